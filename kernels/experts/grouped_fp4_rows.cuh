// SPDX-License-Identifier: Apache-2.0
// Rows as NVFP4 in the products of experts.grouped_w4a4: where their codes lie, and one group of
// 128 inputs multiplied by the block-scaled tensor cores of sm_120a, which take fp4 codes and e4m3
// scales of both operands as they are stored.
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; h half of a k64 step; run 16 inputs.
#pragma once

#include "kernels/core/launch.cuh"
#include "kernels/core/nvfp4_rows.h"
#include "kernels/core/sm120/block_scaled_mma.cuh"
#include "kernels/core/weight.h"

namespace isthmus::kernels::grouped {

// Which inputs a lane multiplies. The weights' tiles are made for k32 steps (weight_tiles.h): of
// each run a lane has four codes, the inputs 4 t to 4 t + 3 of it. A k64 step wants eight of one
// run, so lanes t and t + 2 exchange half of what they have, and nibble 2 j + e of word h of lane t
// is
//
//   input 32 h + 16 (t / 2) + 4 (t mod 2) + 8 e + j   of the 64,  e in 0 .. 1, j in 0 .. 3
//
// Rows are stored in that order. Of a group of 128 a lane finds its four words in 16 bytes: byte
// 64 group + 16 t + 8 (tile of 64) + 4 h. Scales are stored in the order of the runs.
__host__ __device__ __forceinline__ int Fp4WordPlace(int group, int tile, int h, int t) {
  return 64 * group + 16 * t + 8 * tile + 4 * h;
}

// The two words, of lanes t = 2 (run mod 2) and t + 1, of the codes of the 16 inputs of a run.
__host__ __device__ __forceinline__ void PackFp4Run(const uint8_t (&codes)[16],
                                                    uint32_t (&words)[2]) {
  words[0] = 0;
  words[1] = 0;
  for (int k = 0; k < 16; ++k) {
    const int nibble = 2 * (k % 4) + k / 8;
    words[k / 4 % 2] |= uint32_t{codes[k]} << (4 * nibble);
  }
}

// The rows of a unit that this lane multiplies, as RowPlaces.
template <int kBlocks>
struct Fp4Places {
  const uint8_t* codes;          // [rows, inputs / 2]
  const uint8_t* scales;         // [rows, inputs / 16]
  uint32_t first_code[kBlocks];  // The row's first: half of it is its byte, 1 / 16 its scale.
};

// One group of the rows: B fragments of its two tiles, and their scales.
template <int kBlocks>
struct Fp4Rows {
  uint32_t words[kBlocks][4];
  uint32_t scales[kBlocks][2];

  __device__ __forceinline__ void Load(const Fp4Places<kBlocks>& places, int group) {
    const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      const uint32_t first = places.first_code[nb];
      const uint4 v =
          *reinterpret_cast<const uint4*>(places.codes + first / 2 + Fp4WordPlace(group, 0, 0, t));
      words[nb][0] = v.x;
      words[nb][1] = v.y;
      words[nb][2] = v.z;
      words[nb][3] = v.w;
      const uint2 s = *reinterpret_cast<const uint2*>(places.scales + first / 16 + 8 * group);
      scales[nb][0] = s.x;
      scales[nb][1] = s.y;
    }
  }
};

// The A fragment of a k64 step from this lane's 16 bytes of a tile. By a whole warp.
__device__ __forceinline__ void Fp4Fragment(const uint4& codes, uint32_t (&a)[4]) {
  const bool is_upper = (threadIdx.x & 2u) != 0;
  const uint32_t kept[2] = {is_upper ? codes.y : codes.x, is_upper ? codes.w : codes.z};
  const uint32_t given[2] = {is_upper ? codes.x : codes.y, is_upper ? codes.z : codes.w};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, given[h], 2);
    const uint32_t first = is_upper ? got : kept[h];
    const uint32_t second = is_upper ? kept[h] : got;
    // Row g has the low nibbles of a word, row g + 8 the high ones.
    a[2 * h] = (first & 0x0f0f0f0fu) | (second << 4 & 0xf0f0f0f0u);
    a[2 * h + 1] = (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
  }
}

// 2^(8 - distance) as e4m3, for the scale of 32 inputs that is `distance` binades below the other
// one of a tile: exact down to 2^-9, and 0 where it is less than 2^-17 of the other.
__host__ __device__ __forceinline__ uint32_t E4m3Below(int distance) {
  if (distance > 17) return 0;
  return distance >= 15 ? 8u >> (distance - 14) : static_cast<uint32_t>(15 - distance) << 3;
}

// MXFP4 has powers of two that e4m3 cannot hold: the instruction gets them relative to the larger
// one of a row and tile, which becomes 2^8, and the sum is multiplied with `factors` (of row g and
// of row g + 8) afterwards.
__device__ __forceinline__ uint32_t RelativeScales(uint32_t word, float (&factors)[2]) {
  int larger[2];
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const int s0 = static_cast<int>(word >> (16 * row) & 0xffu);
    const int s1 = static_cast<int>(word >> (16 * row + 8) & 0xffu);
    larger[row] = s0 > s1 ? s0 : s1;
    factors[row] = __uint_as_float(static_cast<uint32_t>(larger[row]) << 23) * 0x1p-8f;
  }
  const unsigned row = threadIdx.x % 2;  // Lanes t = 0 and 2: row g; 1 and 3: row g + 8.
  const int of_row = static_cast<int>(word >> (16 * row));
  const int top = row == 0 ? larger[0] : larger[1];
  const uint32_t low = E4m3Below(top - (of_row & 0xff));
  const uint32_t high = E4m3Below(top - (of_row >> 8 & 0xff));
  return low * 0x0101u | high * 0x01010000u;
}

// totals[nb] += weights of one group (two k64 tiles) times rows, without the scales of the rows and
// the factor of the matrix.
template <WeightFormat kFormat, int kBlocks>
__device__ __forceinline__ void MultiplyFp4RowsGroup(const unsigned char* tiles,
                                                     const Fp4Rows<kBlocks>& rows,
                                                     float (&totals)[kBlocks][4]) {
  constexpr bool kIsMx = kFormat == WeightFormat::kMxfp4;
  constexpr int kTile = kIsMx ? 544 : 576;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const unsigned char* at = tiles + tile * kTile;
    uint32_t a[4];
    Fp4Fragment(*reinterpret_cast<const uint4*>(at + 16 * lane), a);
    uint32_t scale;
    float factors[2] = {};
    if constexpr (kIsMx) {
      scale =
          RelativeScales(*reinterpret_cast<const uint32_t*>(at + 512 + 4 * (lane / 4)), factors);
    } else {
      scale = *reinterpret_cast<const uint32_t*>(at + 512 + 8 * (lane / 4) + 4 * (lane % 2));
    }
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      const uint32_t b[2] = {rows.words[nb][2 * tile], rows.words[nb][2 * tile + 1]};
      if constexpr (kIsMx) {
        float c[4] = {};
        MmaNvfp4(c, a, b, scale, rows.scales[nb][tile]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          totals[nb][i] = fmaf(c[i], factors[i / 2], totals[nb][i]);
        }
      } else {
        MmaNvfp4(totals[nb], a, b, scale, rows.scales[nb][tile]);
      }
    }
  }
}

}  // namespace isthmus::kernels::grouped
