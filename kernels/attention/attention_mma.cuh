// SPDX-License-Identifier: Apache-2.0
// The parts of attention's tensor-core kernel (attention_split_mma.cu), which multiplies entries as
// they are stored: head_dim 512 in eight blocks of 64 channels, seven of fp8 and one of bf16.
//
// A block of threads takes some heads of one row and its keys in tiles of 32, which it copies to
// shared memory. A warp owns 16 heads or 32 and a slice of the channels, of one block or two, in
// all that is multiplied: it adds that slice's share of the scores, and adds up those columns of
// the output. So q and the output stay in registers, e4m3 codes are converted there once per use,
// and what warps exchange is only shares of scores and the weights of keys.
//
//   mma operands   A: q and weights, rows are heads; B: keys, columns are keys (scores) or channels
//   order of k     free, as long as A and B agree: a lane reads the 16 bytes of four steps at once
//   scales         powers of two; on the scores they multiply the f32 sums, on the values they go
//                  into the weights, relative to the largest seen (ValueFactors)
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; m a tile of 16 heads, n a tile of 8 keys,
// b a block of the warp's slice.
#pragma once

#include "kernels/attention/attention_device.cuh"
#include "kernels/core/async_copy.cuh"
#include "kernels/core/fast_math.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"

namespace isthmus::kernels::attention_mma {

inline constexpr int kHeadDim = 512;
inline constexpr int kNope = 448;
inline constexpr int kEntryBytes = 576;
inline constexpr int kNumBlocks = kHeadDim / kKvNopeBlock;  // Of channels; the last one is bf16.
inline constexpr int kTile = 32;                            // Keys.
inline constexpr int kTileBytes = kTile * kEntryBytes;
inline constexpr int kEightBytes = 8 * kEntryBytes;
inline constexpr int kStages = 3;
inline constexpr int kScaleBytes = 8;
inline constexpr float kLog2E = 1.44269504f;
inline constexpr int kUnset = -10000;  // An exponent before any has been seen.

// Weights are stored as p * 2^kWeightShift with p <= 2^kLateness, so that f16 holds small ones to
// full precision: 2^(7 + 8) is below 65504, and 2^-14 of it a key that counts for nothing.
inline constexpr int kWeightShift = 7;
// The running maximum follows only when it has fallen back by this much (in powers of two).
inline constexpr float kLateness = 8.0f;

// Rows to commit, that the tiles read before they are in the cache: of this chunk (prefill).
inline constexpr int kChunkEntryBytes = kEntryBytes + 16;  // Data, then eight scale bytes.

// How a block of threads divides its work: warp = group * kSlices + slice.
template <int kSlicesOf, int kGroupsOf, int kMTilesOf>
struct BlockShape {
  static constexpr int kSlices = kSlicesOf;             // Of the channels.
  static constexpr int kGroups = kGroupsOf;             // Of the heads.
  static constexpr int kMTiles = kMTilesOf;             // A warp's heads, by 16.
  static constexpr int kBlocks = kNumBlocks / kSlices;  // Of channels, a warp.
  static_assert(kBlocks <= 2);
  static constexpr int kWarps = kSlices * kGroups;
  static constexpr int kThreads = kWarps * kWarpLanes;
  static constexpr int kHeads = 16 * kMTiles * kGroups;
  static constexpr int kUnrolled = kMTiles > 1 ? 1 : 2;  // Passes over half a tile at once.
  // Who weighs keys: a warp kOwned heads, kLanes lanes a head, kKeys keys a lane.
  static constexpr int kOwned = kHeads / kWarps;
  static constexpr int kLanes = kWarpLanes / kOwned;
  static constexpr int kKeys = kTile / kLanes;
};

// What a warp adds up, and what it multiplies with.
template <typename Shape>
struct Sums {
  float o[Shape::kBlocks][Shape::kMTiles][8][4] = {};
};
template <typename Shape>
struct Queries {
  uint32_t q[Shape::kBlocks][4][Shape::kMTiles][4];
};

// Where a key lies. Without data: nothing to copy, and with `is_added` nothing to clear either.
struct alignas(16) Place {
  const std::byte* data;
  const std::byte* scale;
};

// Division of numbers below 2^31 by what the host knows: (n * multiplier) >> shift.
struct Divisor {
  uint32_t multiplier = 0;
  int shift = 0;
};
__device__ __forceinline__ int Quotient(int n, const Divisor& by) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * by.multiplier >> by.shift);
}

// A row's keys, or one split of them. It lies in shared memory, because registers are full.
struct RowKeys {
  const int32_t* selected = nullptr;  // Of this row, or null.
  std::byte* const* pages = nullptr;
  const std::byte* state = nullptr;
  const unsigned char* chunk_entries = nullptr;  // [rows][kChunkEntryBytes]; null: see kAddedRow.
  int64_t row = 0;
  int first_row = 0;       // Of the sequence's chunk.
  int start_position = 0;  // Of the same.
  int first_position = 0;  // Of the window, and its slot of the ring.
  int first_slot = 0;
  int num_window = 0;  // Keys of the window, which come first.
  int num_keys = 0;    // Up to the end of the split.
  int first_tile = 0;
  int num_tiles = 0;  // Of the split; 0: nothing to do.
  int row_tiles = 0;  // Of all splits.
  int tiles_per_split = 0;
  int split = 0;
  int first_head = 0;  // Of the block.
  Divisor by_page;
};

// Shared memory of a block.
template <typename Shape>
struct Shared {
  unsigned char tile[kStages][kTileBytes];
  float share[Shape::kSlices][Shape::kHeads][kTile];  // Of the scores, see ShareAt.
  uint16_t weight_f16[Shape::kHeads][kTile];          // See WeightAt.
  uint16_t weight_bf16[Shape::kHeads][kTile];
  std::byte scales[kStages][kTile][kScaleBytes];
  Place place[2][kTile];
  alignas(16) std::byte added_data[kEntryBytes];  // The row that a decode step adds, encoded.
  alignas(16) std::byte added_scale[kScaleBytes];
  float unscale[Shape::kSlices][Shape::kHeads];  // Of shares, see ConvertQueries.
  float rescale[Shape::kHeads];
  float total[Shape::kHeads];
  RowKeys keys;
  uint32_t valid[4];  // A bit for each key of a tile that is one.
};

// Where 16-byte piece `chunk` of entry `key` (0 to 7) of a tile's first eight lies; the other
// eights follow kEightBytes apart. A warp's reads of 8 keys x 4 pieces, and of 4 even or odd keys x
// 2 pieces, meet each bank once.
__device__ __forceinline__ int TileOffset(int key, int chunk) {
  const int swizzle = chunk < 32 ? key & 6 : key & 2;
  return key * kEntryBytes + ((chunk ^ swizzle) * 16);
}
// The place of key `key` of a head's row of shares: heads g and keys 2t, 2t + 1 meet each bank
// once.
__device__ __forceinline__ int ShareAt(int head, int key) { return key ^ (8 * (head & 3)); }
// The same for weights, of which ldmatrix reads eight keys of eight heads.
__device__ __forceinline__ int WeightAt(int head, int key) { return key ^ (8 * (head >> 1 & 3)); }

__device__ __forceinline__ uint4 ReadChunk(const unsigned char* tile, int eight, int offset) {
  return *reinterpret_cast<const uint4*>(tile + offset + eight * kEightBytes);
}

// The thread and its lane: where registers are full, read anew each time, which takes as long as a
// read of shared memory.
template <typename Shape>
__device__ __forceinline__ int ThreadOf() {
  return Shape::kMTiles > 1 ? FreshThread() : static_cast<int>(threadIdx.x & 1023u);
}
template <typename Shape>
__device__ __forceinline__ int LaneOf() {
  return Shape::kMTiles > 1 ? FreshLane() : static_cast<int>(threadIdx.x % kWarpLanes);
}

template <typename Shape>
__device__ __forceinline__ int SliceOf() {
  return ThreadOf<Shape>() / kWarpLanes % Shape::kSlices;
}
template <typename Shape>
__device__ __forceinline__ int GroupOf() {
  return ThreadOf<Shape>() / kWarpLanes / Shape::kSlices;
}
// Whether block b of the slice is the bf16 one.
template <typename Shape>
__device__ __forceinline__ bool IsBf16(int slice, int b) {
  return b == Shape::kBlocks - 1 && slice == Shape::kSlices - 1;
}

__device__ __forceinline__ float ClampedPower(int exponent) {
  return PowerOfTwo(exponent < -126 ? -126 : exponent > 127 ? 127 : exponent);
}

// Four values of q from element `offset` of the whole matrix.
template <bool kIsBf16>
__device__ __forceinline__ float4 LoadQ(const DeviceAttention& args, int64_t offset) {
  if constexpr (!kIsBf16)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(args.q) + offset);
  const uint2 words =
      *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(args.q) + offset);
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                     __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

// A warp's slice of q as it lies in memory: four channels for step s of block b, of head g + 8 h.
template <typename Shape>
struct RawQueries {
  float4 x[Shape::kMTiles][2][Shape::kBlocks][4];
};

// The first channel of step `s` of four within a block: a lane has 16 bytes of fp8, or two pieces
// of 8 channels of bf16.
__device__ __forceinline__ int StepChannel(bool is_bf16, int t, int s) {
  return is_bf16 ? 8 * t + 32 * (s / 2) + 4 * (s % 2) : 16 * t + 4 * s;
}

// All of it is on its way at once; zero beyond the last head.
template <typename Shape, bool kIsBf16>
__device__ __forceinline__ void LoadQueriesOf(const DeviceAttention& args, int64_t row,
                                              int first_head, RawQueries<Shape>& raw) {
  const int lane = LaneOf<Shape>();
  const int slice = SliceOf<Shape>();
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int head =
          first_head + 16 * (Shape::kMTiles * GroupOf<Shape>() + m) + 8 * half + lane / 4;
      const int64_t at =
          row * args.q_stride + int64_t{head} * kHeadDim + slice * Shape::kBlocks * kKvNopeBlock;
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          const int d = b * kKvNopeBlock + StepChannel(IsBf16<Shape>(slice, b), lane % 4, s);
          raw.x[m][half][b][s] = head < args.num_heads ? LoadQ<kIsBf16>(args, at + d)
                                                       : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void LoadQueries(const DeviceAttention& args, int64_t row,
                                            int first_head, RawQueries<Shape>& raw) {
  if (args.is_q_bf16) {
    LoadQueriesOf<Shape, true>(args, row, first_head, raw);
  } else {
    LoadQueriesOf<Shape, false>(args, row, first_head, raw);
  }
}

// A fragments of q. The slice of each head is multiplied by a power of two that brings its largest
// value near 2^10, so that f16 holds it.
template <typename Shape>
__device__ __forceinline__ void ConvertQueries(const RawQueries<Shape>& raw,
                                               Queries<Shape>& queries, Shared<Shape>& shared) {
  const int lane = LaneOf<Shape>();
  const int slice = SliceOf<Shape>();
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float max = 0.0f;
#pragma unroll
      for (int i = 0; i < 4 * Shape::kBlocks; ++i) {
        const float4 v = raw.x[m][half][i / 4][i % 4];
        max = fmaxf(max, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
      }
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
      int shift = 10 - (static_cast<int>(__float_as_uint(max) >> 23) - 127);
      shift = shift > 100 ? 100 : shift;
      const float factor = PowerOfTwo(shift);
      const int head = 16 * (Shape::kMTiles * GroupOf<Shape>() + m) + 8 * half + lane / 4;
      if (lane % 4 == 0) shared.unscale[slice][head] = PowerOfTwo(-shift);
#pragma unroll
      for (int i = 0; i < 4 * Shape::kBlocks; ++i) {
        const float4 v = raw.x[m][half][i / 4][i % 4];
        const float x = v.x * factor, y = v.y * factor, z = v.z * factor, w = v.w * factor;
        const bool is_bf16 = IsBf16<Shape>(slice, i / 4);
        queries.q[i / 4][i % 4][m][half] = is_bf16 ? Bf16Pair(x, y) : F16Pair(x, y);
        queries.q[i / 4][i % 4][m][half + 2] = is_bf16 ? Bf16Pair(z, w) : F16Pair(z, w);
      }
    }
  }
}

// c += q k over one fp8 block, for the two key tiles from `n`.
template <int kMTiles>
__device__ __forceinline__ void AddFp8Scores(const unsigned char* tile, int lane, int block, int n,
                                             const uint32_t (&q)[4][kMTiles][4],
                                             float (&c)[kMTiles][2][4]) {
  const int offset = TileOffset(lane / 4, 4 * block + lane % 4);
  uint4 codes[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) codes[i] = ReadChunk(tile, n + i, offset);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t words[4] = {codes[i].x, codes[i].y, codes[i].z, codes[i].w};
      uint32_t k[2];
      F16PairsOfE4m3(words[s], k[0], k[1]);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) MmaF16(c[m][i], q[s][m], k);
    }
  }
}

// The same for the bf16 block.
template <int kMTiles>
__device__ __forceinline__ void AddBf16Scores(const unsigned char* tile, int lane, int n,
                                              const uint32_t (&q)[4][kMTiles][4],
                                              float (&c)[kMTiles][2][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int offset = TileOffset(lane / 4, 28 + 4 * half + lane % 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 words = ReadChunk(tile, n + i, offset);
      const uint32_t first[2] = {words.x, words.y};
      const uint32_t second[2] = {words.z, words.w};
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        MmaBf16(c[m][i], q[2 * half][m], first);
        MmaBf16(c[m][i], q[2 * half + 1][m], second);
      }
    }
  }
}

// The exponents of the scales of the warp's blocks of key `key`; 0 where there is no scale.
template <typename Shape>
struct Exponents {
  int of[Shape::kBlocks];
};
template <typename Shape>
__device__ __forceinline__ Exponents<Shape> ExponentsOf(const std::byte (&scales)[kTile][8],
                                                        int key) {
  const int slice = SliceOf<Shape>();
  Exponents<Shape> out;
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) {
    const int byte = static_cast<int>(scales[key][Shape::kBlocks * slice + b]);
    out.of[b] = IsBf16<Shape>(slice, b) ? 0 : byte - 127;
  }
  return out;
}

// The exponent, biased, by which sums of scores are multiplied behind each block, a byte a block.
template <typename Shape>
__device__ __forceinline__ uint32_t KeyFactors(const Exponents<Shape>& exponents) {
  uint32_t packed = 0;
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) {
    int e = exponents.of[b];
    if constexpr (Shape::kBlocks == 2) e -= b == 0 ? exponents.of[1] : 0;
    e = e < -126 ? -126 : e > 127 ? 127 : e;
    packed |= static_cast<uint32_t>(e + 127) << (8 * b);
  }
  return packed;
}

// Multiplies the columns of two key tiles by their keys' factors; factors[i][column].
template <int kMTiles>
__device__ __forceinline__ void ScaleScores(const uint32_t (&factors)[2][2], int b,
                                            float (&c)[kMTiles][2][4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float even = __uint_as_float((factors[i][0] >> (8 * b) & 0xffu) << 23);
    const float odd = __uint_as_float((factors[i][1] >> (8 * b) & 0xffu) << 23);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      c[m][i][0] *= even;
      c[m][i][1] *= odd;
      c[m][i][2] *= even;
      c[m][i][3] *= odd;
    }
  }
}

// The warp's share of a tile's scores, to their owners.
template <typename Shape>
__device__ __forceinline__ void ShareScores(const Queries<Shape>& queries, int stage,
                                            Shared<Shape>& shared) {
  constexpr int kMTiles = Shape::kMTiles;
  const int lane = LaneOf<Shape>();
  const int slice = SliceOf<Shape>();
  const unsigned char* tile = shared.tile[stage];
  const uint32_t packed = KeyFactors<Shape>(ExponentsOf<Shape>(shared.scales[stage], lane));
#pragma unroll Shape::kUnrolled
  for (int n = 0; n < kTile / 8; n += 2) {
    uint32_t factors[2][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      factors[i / 2][i % 2] =
          __shfl_sync(kFullWarp, packed, 8 * (n + i / 2) + 2 * (lane % 4) + i % 2);
    }
    float c[kMTiles][2][4] = {};
#pragma unroll
    for (int b = 0; b < Shape::kBlocks; ++b) {
      if (IsBf16<Shape>(slice, b)) {
        AddBf16Scores<kMTiles>(tile, lane, n, queries.q[b], c);
      } else {
        AddFp8Scores<kMTiles>(tile, lane, Shape::kBlocks * slice + b, n, queries.q[b], c);
      }
      ScaleScores<kMTiles>(factors, b, c);
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int head = 16 * (kMTiles * GroupOf<Shape>() + m) + 8 * half + lane / 4;
        const float unscale = shared.unscale[slice][head];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float* to = &shared.share[slice][head][ShareAt(head, 8 * (n + i) + 2 * (lane % 4))];
          *reinterpret_cast<float2*>(to) =
              make_float2(c[m][i][2 * half] * unscale, c[m][i][2 * half + 1] * unscale);
        }
      }
    }
  }
}

// What a lane knows of its owned head.
struct OwnedHead {
  float max = -INFINITY;
  float sum = 0.0f;  // Of weights, of this lane's keys.
};

// kCount floats or f16 pairs between registers and memory aligned for all of them together.
template <int kCount>
__device__ __forceinline__ void AddShare(const float* from, float (&s)[kCount]) {
  if constexpr (kCount == 2) {
    const float2 v = *reinterpret_cast<const float2*>(from);
    s[0] += v.x;
    s[1] += v.y;
  } else {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(from + i);
      s[i] += v.x;
      s[i + 1] += v.y;
      s[i + 2] += v.z;
      s[i + 3] += v.w;
    }
  }
}
template <int kPairs>
__device__ __forceinline__ void StorePairs(const uint32_t (&pairs)[kPairs], uint16_t* to) {
  if constexpr (kPairs == 1) {
    *reinterpret_cast<uint32_t*>(to) = pairs[0];
  } else if constexpr (kPairs == 2) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[1]);
  } else {
    *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// Turns the shares of the lane's keys of its head into weights. `factor` turns sums of q k into
// scores in powers of two; `valid` has a bit a key.
template <typename Shape>
__device__ __forceinline__ void WeighKeys(float factor, uint32_t valid, Shared<Shape>& shared,
                                          OwnedHead& owned) {
  constexpr int kKeys = Shape::kKeys;
  const int lane = LaneOf<Shape>();
  const int warp = ThreadOf<Shape>() / kWarpLanes;
  const int head = Shape::kOwned * warp + lane / Shape::kLanes;
  const int first = lane % Shape::kLanes * kKeys;
  float s[kKeys] = {};
#pragma unroll
  for (int slice = 0; slice < Shape::kSlices; ++slice) {
    AddShare<kKeys>(&shared.share[slice][head][ShareAt(head, first)], s);
  }
  const uint32_t mine = valid >> first;
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    s[i] = (mine & 1u << i) != 0 ? s[i] * factor : -INFINITY;
    max = fmaxf(max, s[i]);
  }
#pragma unroll
  for (int lanes = 1; lanes < Shape::kLanes; lanes *= 2) {
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, lanes));
  }
  float rescale = 1.0f;
  if (max > owned.max + kLateness) {  // Also at first: -infinity is below everything.
    rescale = FastExp2(owned.max - max);
    owned.max = max;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    s[i] = FastExp2(s[i] - owned.max);
    sum += s[i];
  }
  owned.sum = fmaf(owned.sum, rescale, sum);
  if (lane % Shape::kLanes == 0) shared.rescale[head] = rescale;
  constexpr float kShift = static_cast<float>(1 << kWeightShift);
  uint32_t f16[kKeys / 2];
  uint32_t bf16[kKeys / 2];
#pragma unroll
  for (int i = 0; i < kKeys / 2; ++i) {
    f16[i] = F16Pair(s[2 * i] * kShift, s[2 * i + 1] * kShift);
    bf16[i] = Bf16Pair(s[2 * i] * kShift, s[2 * i + 1] * kShift);
  }
  StorePairs<kKeys / 2>(f16, &shared.weight_f16[head][WeightAt(head, first)]);
  StorePairs<kKeys / 2>(bf16, &shared.weight_bf16[head][WeightAt(head, first)]);
}

}  // namespace isthmus::kernels::attention_mma
