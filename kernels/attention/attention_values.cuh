// SPDX-License-Identifier: Apache-2.0
// How a warp of attention's tensor-core kernel multiplies weights and values: its own columns of
// the output, over a tile of keys (attention_mma.cuh, whose letters these are).
#pragma once

#include "kernels/attention/attention_mma.cuh"

namespace isthmus::kernels::attention_mma {

// The exponents that the values of the warp's blocks are relative to: the largest ones seen.
template <typename Shape>
struct Units {
  int exponent[Shape::kBlocks];
};

// Moves the units to the largest exponents of a tile, and o after them and after the maximum of
// each head, which the owners of scores have moved. Mostly there is nothing to do.
template <typename Shape>
__device__ __forceinline__ void RescaleValues(const Exponents<Shape>& exponents, bool has_key,
                                              const Shared<Shape>& shared, Units<Shape>& units,
                                              Sums<Shape>& sums) {
  const int g = LaneOf<Shape>() / 4;
  float of_head[Shape::kMTiles][2];
  float of_block[Shape::kBlocks];
  bool any = false;
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head = 16 * (Shape::kMTiles * GroupOf<Shape>() + m) + 8 * half + g;
      of_head[m][half] = shared.rescale[head];
      any = any || of_head[m][half] != 1.0f;
    }
  }
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) {
    const int largest = __reduce_max_sync(kFullWarp, has_key ? exponents.of[b] : kUnset);
    of_block[b] = 1.0f;
    if (largest > units.exponent[b]) {
      of_block[b] = ClampedPower(units.exponent[b] - largest);
      units.exponent[b] = largest;
      any = true;
    }
  }
  if (__any_sync(kFullWarp, any ? 1 : 0) == 0) return;
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) {
#pragma unroll
    for (int m = 0; m < Shape::kMTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums.o[b][m][j][i] *= of_head[m][i / 2] * of_block[b];
      }
    }
  }
}

// The factors of the lane's key for the values of the warp's blocks, as f16, a half word a block.
template <typename Shape>
__device__ __forceinline__ uint32_t ValueFactors(const Exponents<Shape>& exponents, bool has_key,
                                                 const Units<Shape>& units) {
  uint32_t packed = 0;
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) {
    const int down = units.exponent[b] - exponents.of[b];
    const uint32_t factor = !has_key || down > 24 ? 0u
                            : down <= 14          ? static_cast<uint32_t>(15 - down) << 10
                                                  : 1u << (24 - down);
    packed |= factor << (16 * b);
  }
  return packed;
}

// A fragments of 16 keys' weights.
template <typename Shape>
__device__ __forceinline__ void ReadWeights(const uint16_t (&weight)[Shape::kHeads][kTile], int k16,
                                            uint32_t (&p)[Shape::kMTiles][4]) {
  const int lane = LaneOf<Shape>();
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
    const int head = 16 * (Shape::kMTiles * GroupOf<Shape>() + m) + lane % 16;
    LoadMatrix<4, false>(p[m], &weight[head][WeightAt(head, 16 * k16 + lane / 16 * 8)]);
  }
}

// o += p v over 16 keys and one fp8 block. o[m][j] holds columns 8 n + j of the block. `low` and
// `high`: the factors of keys 2t, 2t + 1 and 2t + 8, 2t + 9.
template <int kMTiles>
__device__ __forceinline__ void AddFp8Values(const unsigned char* tile, int lane, int block,
                                             int k16, uint32_t low, uint32_t high,
                                             const uint32_t (&weights)[kMTiles][4],
                                             float (&o)[kMTiles][8][4]) {
  const int g = lane / 4;
  uint32_t p[kMTiles][4];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[m][i] = MultiplyF16Pair(weights[m][i], i < 2 ? low : high);
  }
  // Keys 2t and 2t + 1 have one swizzle.
  const unsigned char* even = tile + TileOffset(2 * (lane % 4), 4 * block + g / 2) + 8 * (g % 2);
  uint2 codes[4];  // Eight channels of keys 2t, 2t + 1, 2t + 8 and 2t + 9.
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int eight = 2 * k16 + i / 2;
    codes[i] = *reinterpret_cast<const uint2*>(even + eight * kEightBytes + i % 2 * kEntryBytes);
  }
#pragma unroll
  for (int word = 0; word < 2; ++word) {
    uint32_t v[2][4];  // [keys 2t, 2t + 8][channel]
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t a = word == 0 ? codes[2 * i].x : codes[2 * i].y;
      const uint32_t b = word == 0 ? codes[2 * i + 1].x : codes[2 * i + 1].y;
      F16PairsOfE4m3(__byte_perm(a, b, 0x5140), v[i][0], v[i][1]);
      F16PairsOfE4m3(__byte_perm(a, b, 0x7362), v[i][2], v[i][3]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t values[2] = {v[0][j], v[1][j]};
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) MmaF16(o[m][4 * word + j], p[m], values);
    }
  }
}

// The same for the bf16 block.
template <int kMTiles>
__device__ __forceinline__ void AddBf16Values(const unsigned char* tile, int lane, int k16,
                                              const uint32_t (&p)[kMTiles][4],
                                              float (&o)[kMTiles][8][4]) {
  const unsigned char* even = tile + TileOffset(2 * (lane % 4), 28 + lane / 4);
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // Four channels at a time, for want of registers.
    uint2 rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int eight = 2 * k16 + i / 2;
      rows[i] = *reinterpret_cast<const uint2*>(even + eight * kEightBytes + i % 2 * kEntryBytes +
                                                8 * half);
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t v[2][2];  // [keys 2t, 2t + 8][channel]
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t a = word == 0 ? rows[2 * i].x : rows[2 * i].y;
        const uint32_t b = word == 0 ? rows[2 * i + 1].x : rows[2 * i + 1].y;
        v[i][0] = __byte_perm(a, b, 0x5410);
        v[i][1] = __byte_perm(a, b, 0x7632);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint32_t values[2] = {v[0][j], v[1][j]};
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) MmaBf16(o[m][4 * half + 2 * word + j], p[m], values);
      }
    }
  }
}

// Adds a tile's values. `valid` has a bit for each key that is one.
template <typename Shape>
__device__ __forceinline__ void AddTileValues(int stage, uint32_t valid,
                                              const Shared<Shape>& shared, Units<Shape>& units,
                                              Sums<Shape>& sums) {
  const int lane = LaneOf<Shape>();
  const int slice = SliceOf<Shape>();
  const Exponents<Shape> exponents = ExponentsOf<Shape>(shared.scales[stage], lane);
  const bool has_key = (valid >> lane & 1u) != 0;
  RescaleValues<Shape>(exponents, has_key, shared, units, sums);
  const uint32_t packed = ValueFactors<Shape>(exponents, has_key, units);
#pragma unroll Shape::kUnrolled
  for (int k16 = 0; k16 < kTile / 16; ++k16) {
    uint32_t of_key[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      of_key[i] = __shfl_sync(kFullWarp, packed, 16 * k16 + 2 * (lane % 4) + 8 * (i / 2) + i % 2);
    }
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      uint32_t p[Shape::kMTiles][4];
      if (IsBf16<Shape>(slice, b)) {
        ReadWeights<Shape>(shared.weight_bf16, k16, p);
        AddBf16Values<Shape::kMTiles>(shared.tile[stage], lane, k16, p, sums.o[b]);
      } else {
        ReadWeights<Shape>(shared.weight_f16, k16, p);
        const unsigned selector = b == 0 ? 0x5410 : 0x7632;
        AddFp8Values<Shape::kMTiles>(shared.tile[stage], lane, Shape::kBlocks * slice + b, k16,
                                     __byte_perm(of_key[0], of_key[1], selector),
                                     __byte_perm(of_key[2], of_key[3], selector), p, sums.o[b]);
      }
    }
  }
}

}  // namespace isthmus::kernels::attention_mma
