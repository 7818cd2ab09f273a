// SPDX-License-Identifier: Apache-2.0
// The parts of attention's tensor-core kernel (attention_split_mma.cu), which multiplies entries as
// they are stored: head_dim 512 in eight blocks of 64 channels, seven of fp8 and one of bf16.
//
// A block of four warps takes up to 16 * kMTiles heads of one row and its keys in tiles of 32.
// Warp w owns blocks 2w and 2w + 1 of the channels, in all three things: it copies that slice of
// the tile's entries to shared memory, adds that slice's share of the scores, and adds up those
// columns of the output. So the slices of a tile never cross warps, e4m3 codes are converted in
// registers once per use, and what warps exchange is only shares of scores and the weights of keys.
//
//   mma operands   A: q and weights, rows are heads; B: keys, columns are keys (scores) or channels
//   order of k     free, as long as A and B agree: a lane reads the 16 bytes of four steps at once
//   scales         powers of two; on the scores they multiply the f32 sums, on the values they go
//                  into the weights, relative to the largest seen (ValueScale)
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
inline constexpr int kWarps = 4;
inline constexpr int kBf16Warp = 3;  // Its second block is the bf16 one.
inline constexpr int kThreads = kWarps * kWarpLanes;
inline constexpr int kTile = 32;  // Keys.
inline constexpr int kKeyTiles = kTile / 8;
inline constexpr int kTileBytes = kTile * kEntryBytes;
inline constexpr int kEightBytes = 8 * kEntryBytes;
inline constexpr int kStages = 2;
inline constexpr int kScaleBytes = 8;
inline constexpr int kKindTiles = 4;  // Tiles between the first step of a key and its use, and it.
inline constexpr int kSliceChunks = 8;  // 16-byte pieces of two fp8 blocks.
inline constexpr float kLog2E = 1.44269504f;

// Weights are stored as p * 2^kWeightShift with p <= 2^kLateness, so that f16 holds small ones to
// full precision: 2^(7 + 8) is below 65504, and 2^-14 of it a key that counts for nothing.
inline constexpr int kWeightShift = 7;
// The running maximum follows only when it has fallen back by this much (in powers of two).
inline constexpr float kLateness = 8.0f;

// Rows to commit, that the tiles read before they are in the cache: of this chunk (prefill).
inline constexpr int kChunkEntryBytes = kEntryBytes + 16;  // Data, then eight scale bytes.

// Weights of a tile's keys as A fragments: [m][k16][half][lane][word].
template <int kMTiles>
using Weights = uint32_t[kMTiles][2][2][kWarpLanes][2];

// The row that a decode step adds, encoded.
struct AddedRow {
  alignas(16) std::byte data[kEntryBytes];
  alignas(16) std::byte scale[8];
};

// A block's row and its keys, or one split of them. It lies in shared memory because the registers
// are full.
struct RowKeys {
  int64_t row = 0;
  const DeviceSequence* sequence = nullptr;
  const int32_t* selected = nullptr;             // Of this row, or null.
  const unsigned char* chunk_entries = nullptr;  // [rows][kChunkEntryBytes]; null: see kAddedRow.
  int first_position = 0;                        // Of the window.
  int num_window = 0;                            // Keys of the window, which come first.
  int splits = 0;
  int num_keys = 0;  // Up to the end of the split.
};

// What an owner knows of its heads, a head in each group of four lanes.
struct OwnedHeads {
  float factor = 0.0f;  // From sums of q k to scores in powers of two.
  float max = -INFINITY;
  float sum = 0.0f;  // Of weights, of this lane's keys.
};

// How far the lanes have followed their keys, see attention_keys.cuh.
struct KeyQueue {
  int kind[kKindTiles][kThreads];
  const std::byte* page[2][kThreads];
  alignas(8) std::byte scales[2][kThreads][kScaleBytes];
};

// Shared memory of a block.
template <int kMTiles>
struct Shared {
  static constexpr int kOwners = 2 * kMTiles;  // Warps that own eight heads' scores each.
  unsigned char tile[kStages][kTileBytes];
  float share[kOwners][kWarps][kWarpLanes][8];  // Of the scores.
  Weights<kMTiles> weight_f16;
  Weights<kMTiles> weight_bf16;
  float key_factor[kWarps][2][kTile];       // [w][b]
  uint16_t value_factor[kWarps][2][kTile];  // [w][b], f16
  float head_max[kWarps][16 * kMTiles];
  float rescale[16 * kMTiles];
  float total[16 * kMTiles];
  AddedRow added_row;
  int largest_exponent[kWarps][2];  // [w][b]: of the scales seen, the unit of the output's sums.
  RowKeys keys;
  KeyQueue queue;
  OwnedHeads heads[kOwners][kWarpLanes];
  unsigned turn;
};

// Where 16-byte piece `chunk` of entry `key` (0 to 7) of a tile's first eight lies; the other
// eights follow kEightBytes apart. A warp's reads of 8 keys x 4 pieces, and of 4 even or odd keys x
// 2 pieces, meet each bank once.
__device__ __forceinline__ int TileOffset(int key, int chunk) {
  const int swizzle = chunk < 32 ? key & 6 : key & 2;
  return key * kEntryBytes + ((chunk ^ swizzle) * 16);
}

__device__ __forceinline__ uint4 ReadChunk(const unsigned char* tile, int eight, int offset) {
  return *reinterpret_cast<const uint4*>(tile + offset + eight * kEightBytes);
}

// The channel within a block that step `s` of four begins with, four channels a lane and step:
// fp8 in 16 bytes of a lane, bf16 in two pieces of 8 channels.
__device__ __forceinline__ int StepChannel(bool is_bf16, int t, int s) {
  return is_bf16 ? 8 * t + 32 * (s / 2) + 4 * (s % 2) : 16 * t + 4 * s;
}

__device__ __forceinline__ float ClampedPower(int exponent) {
  return PowerOfTwo(exponent < -126 ? -126 : exponent > 127 ? 127 : exponent);
}

// Four values of q from channel `offset` of the whole matrix.
__device__ __forceinline__ float4 LoadQ(const DeviceAttention& args, int64_t offset) {
  if (!args.is_q_bf16)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(args.q) + offset);
  const uint2 words =
      *reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(args.q) + offset);
  return make_float4(__uint_as_float(words.x << 16), __uint_as_float(words.x & 0xffff0000u),
                     __uint_as_float(words.y << 16), __uint_as_float(words.y & 0xffff0000u));
}

// Four channels of q for step `s` of block `b` of the warp's slice; zero beyond the last head.
__device__ __forceinline__ float4 LoadStep(const DeviceAttention& args, int64_t row, int head,
                                           int b, int s) {
  if (head >= args.num_heads) return make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int d = (2 * warp + b) * 64 + StepChannel(warp == kBf16Warp && b == 1, t, s);
  return LoadQ(args, row * args.q_stride + int64_t{head} * kHeadDim + d);
}

// The largest value of each head in the warp's slice of q, to head_max.
template <int kMTiles>
__device__ __forceinline__ void FindHeadMax(const DeviceAttention& args, int64_t row,
                                            int first_head, Shared<kMTiles>& shared) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
#pragma unroll
  for (int eight = 0; eight < 2 * kMTiles; ++eight) {
    const int h = 8 * eight + lane / 4;
    float max = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 v = LoadStep(args, row, first_head + h, i / 4, i % 4);
      max = fmaxf(max, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    }
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
    max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
    if (lane % 4 == 0) shared.head_max[warp][h] = max;
  }
}

// The warp's slice of q, to where its A fragments lie for a moment, in the memory of the tiles.
// Each head is multiplied by a power of two that brings its largest value near 2^10, so that f16
// holds it. Returns the inverse for the lane's head of those whose scores the warp owns. After a
// barrier behind FindHeadMax, which has brought q to L1.
template <int kMTiles>
__device__ __forceinline__ float ConvertQueries(const DeviceAttention& args, int64_t row,
                                                int first_head, Shared<kMTiles>& shared) {
  static_assert(sizeof(shared.tile) >= kThreads * 8 * kMTiles * sizeof(uint4));
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  auto* fragments = reinterpret_cast<uint2*>(shared.tile);
  float unscale = 0.0f;
#pragma unroll 1
  for (int eight = 0; eight < 2 * kMTiles; ++eight) {
    const int h = 8 * eight + lane / 4;
    const float max = fmaxf(fmaxf(shared.head_max[0][h], shared.head_max[1][h]),
                            fmaxf(shared.head_max[2][h], shared.head_max[3][h]));
    int shift = 10 - (static_cast<int>(__float_as_uint(max) >> 23) - 127);
    shift = shift > 100 ? 100 : shift;
    const float factor = PowerOfTwo(shift);
    if (warp == eight) unscale = PowerOfTwo(-shift);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 v = LoadStep(args, row, first_head + h, i / 4, i % 4);
      const bool is_bf16 = warp == kBf16Warp && i >= 4;
      fragments[((warp * 8 + i) * 2 * kMTiles + eight) * kWarpLanes + lane] =
          is_bf16 ? make_uint2(Bf16Pair(v.x * factor, v.y * factor),
                               Bf16Pair(v.z * factor, v.w * factor))
                  : make_uint2(F16Pair(v.x * factor, v.y * factor),
                               F16Pair(v.z * factor, v.w * factor));
    }
  }
  return unscale;
}

// What the same warp has converted.
template <int kMTiles>
__device__ __forceinline__ void ReadQueries(const Shared<kMTiles>& shared,
                                            uint32_t (&q)[2][4][kMTiles][4]) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const auto* fragments = reinterpret_cast<const uint2*>(shared.tile);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int eight = 0; eight < 2 * kMTiles; ++eight) {
      const uint2 words = fragments[((warp * 8 + i) * 2 * kMTiles + eight) * kWarpLanes + lane];
      q[i / 4][i % 4][eight / 2][eight % 2] = words.x;
      q[i / 4][i % 4][eight / 2][eight % 2 + 2] = words.y;
    }
  }
}

// c += q k over one fp8 block, for the two key tiles from `n`.
template <int kMTiles>
__device__ __forceinline__ void AddFp8Scores(const unsigned char* tile, int block, int n,
                                             const uint32_t (&q)[4][kMTiles][4],
                                             float (&c)[kMTiles][2][4]) {
  const int lane = FreshLane();
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
      k[0] = F16PairOfE4m3(words[s]);
      k[1] = F16PairOfE4m3(words[s] >> 16);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) MmaF16(c[m][i], q[s][m], k);
    }
  }
}

// The same for the bf16 block.
template <int kMTiles>
__device__ __forceinline__ void AddBf16Scores(const unsigned char* tile, int n,
                                              const uint32_t (&q)[4][kMTiles][4],
                                              float (&c)[kMTiles][2][4]) {
  const int lane = FreshLane();
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

// Multiplies the columns of the two key tiles from `n` by their keys' factors.
template <int kMTiles>
__device__ __forceinline__ void ScaleScores(const float* factor, int n, float (&c)[kMTiles][2][4]) {
  const int t = FreshLane() % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 f = *reinterpret_cast<const float2*>(factor + 8 * (n + i) + 2 * t);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      c[m][i][0] *= f.x;
      c[m][i][1] *= f.y;
      c[m][i][2] *= f.x;
      c[m][i][3] *= f.y;
    }
  }
}

// The warp's share of the tile's scores, to their owners.
template <int kMTiles>
__device__ __forceinline__ void ShareScores(const unsigned char* tile,
                                            const uint32_t (&q)[2][4][kMTiles][4],
                                            Shared<kMTiles>& shared) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int n = 2 * pair;
    float c[kMTiles][2][4] = {};
    AddFp8Scores<kMTiles>(tile, 2 * warp, n, q[0], c);
    ScaleScores<kMTiles>(shared.key_factor[warp][0], n, c);
    if (warp == kBf16Warp) {
      AddBf16Scores<kMTiles>(tile, n, q[1], c);
    } else {
      AddFp8Scores<kMTiles>(tile, 2 * warp + 1, n, q[1], c);
    }
    ScaleScores<kMTiles>(shared.key_factor[warp][1], n, c);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int owner = 2 * m + half;
        const float4 v = make_float4(c[m][0][2 * half], c[m][0][2 * half + 1], c[m][1][2 * half],
                                     c[m][1][2 * half + 1]);
        *reinterpret_cast<float4*>(&shared.share[owner][warp][lane][4 * pair]) = v;
      }
    }
  }
}

// Turns the shares of the warp's eight heads into weights. `valid` has a bit a key.
template <int kMTiles>
__device__ __forceinline__ void WeighKeys(Shared<kMTiles>& shared, uint32_t valid) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int t = lane % 4;
  OwnedHeads heads = shared.heads[warp][lane];
  float s[8] = {};
#pragma unroll
  for (int from = 0; from < kWarps; ++from) {
    const float4 low = *reinterpret_cast<const float4*>(&shared.share[warp][from][lane][0]);
    const float4 high = *reinterpret_cast<const float4*>(&shared.share[warp][from][lane][4]);
    s[0] += low.x;
    s[1] += low.y;
    s[2] += low.z;
    s[3] += low.w;
    s[4] += high.x;
    s[5] += high.y;
    s[6] += high.z;
    s[7] += high.w;
  }
  float max = -INFINITY;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int key = 8 * (i / 2) + 2 * t + i % 2;
    s[i] = (valid >> key & 1u) != 0 ? s[i] * heads.factor : -INFINITY;
    max = fmaxf(max, s[i]);
  }
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
  max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
  float rescale = 1.0f;
  if (max > heads.max + kLateness) {  // Also at first: -infinity is below everything.
    rescale = FastExp2(heads.max - max);
    heads.max = max;
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    s[i] = FastExp2(s[i] - heads.max);
    sum += s[i];
  }
  heads.sum = fmaf(heads.sum, rescale, sum);
  shared.heads[warp][lane] = heads;
  if (t == 0) shared.rescale[8 * warp + lane / 4] = rescale;
  constexpr float kShift = static_cast<float>(1 << kWeightShift);
#pragma unroll
  for (int k16 = 0; k16 < 2; ++k16) {
    const float* p = s + 4 * k16;
    const uint2 f16 =
        make_uint2(F16Pair(p[0] * kShift, p[1] * kShift), F16Pair(p[2] * kShift, p[3] * kShift));
    const uint2 bf16 =
        make_uint2(Bf16Pair(p[0] * kShift, p[1] * kShift), Bf16Pair(p[2] * kShift, p[3] * kShift));
    *reinterpret_cast<uint2*>(shared.weight_f16[warp / 2][k16][warp % 2][lane]) = f16;
    *reinterpret_cast<uint2*>(shared.weight_bf16[warp / 2][k16][warp % 2][lane]) = bf16;
  }
}

// A fragments of 16 keys' weights.
template <int kMTiles>
__device__ __forceinline__ void ReadWeights(const Weights<kMTiles>& weight, int k16,
                                            uint32_t (&p)[kMTiles][4]) {
  const int lane = FreshLane();
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 words = *reinterpret_cast<const uint2*>(weight[m][k16][half][lane]);
      p[m][half] = words.x;
      p[m][half + 2] = words.y;
    }
  }
}

// o += p v over 16 keys and one fp8 block. o[m][j] holds columns 8 n + j of the block.
template <int kMTiles>
__device__ __forceinline__ void AddFp8Values(const unsigned char* tile, int block, int k16,
                                             const uint16_t* factor,
                                             const Weights<kMTiles>& weights,
                                             float (&o)[kMTiles][8][4]) {
  const int lane = FreshLane();
  const int g = lane / 4;
  const int key = 16 * k16 + 2 * (lane % 4);
  const uint32_t low = *reinterpret_cast<const uint32_t*>(factor + key);
  const uint32_t high = *reinterpret_cast<const uint32_t*>(factor + key + 8);
  uint32_t p[kMTiles][4];
  ReadWeights<kMTiles>(weights, k16, p);
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) p[m][i] = MultiplyF16Pair(p[m][i], i < 2 ? low : high);
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
      const uint32_t first = __byte_perm(a, b, 0x5140);
      const uint32_t second = __byte_perm(a, b, 0x7362);
      v[i][0] = F16PairOfE4m3(first);
      v[i][1] = F16PairOfE4m3(first >> 16);
      v[i][2] = F16PairOfE4m3(second);
      v[i][3] = F16PairOfE4m3(second >> 16);
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
__device__ __forceinline__ void AddBf16Values(const unsigned char* tile, int k16,
                                              const Weights<kMTiles>& weights,
                                              float (&o)[kMTiles][8][4]) {
  const int lane = FreshLane();
  uint32_t p[kMTiles][4];
  ReadWeights<kMTiles>(weights, k16, p);
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

}  // namespace isthmus::kernels::attention_mma
