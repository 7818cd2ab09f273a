// SPDX-License-Identifier: Apache-2.0
// Post, mix, gates, the weighted sum and its RMSNorm in two launches, on tensor cores: patches
// fused_post_pre and fused_pre. This is the first: post and the sums of the mixes.
//
// Bound by memory with many tokens: y and the streams are read once and the new streams written
// once, 72 KB a token of hidden 4096 in bf16; and by latency with few. A block has 64 columns of
// all four streams, so that the new streams of its columns need nothing from elsewhere, and the
// weights of its columns stay in registers while tiles of eight tokens pass, four stages ahead. Its
// sums for the 24 mixes and the squares go to `partials`, which a block a token adds up in the
// second launch (mix_finish.cuh). A last block to come that did so held up its own tiles, was
// therefore the last again, and finished alone what it should have shared.
//
// fn is multiplied in bf16 terms that add up to f32 (8 bits each), or in tf32; streams in reference
// arithmetic are bf16 numbers, so they lose nothing.
//
// Letters: g t of a lane's place in a fragment (mma.cuh), j destination stream, u token of a tile.
#pragma once

#include "kernels/core/async_copy.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/hyper_connection/hyper_connection_device.cuh"

namespace isthmus::kernels::mix {

enum class Precision : uint8_t { kBf16, kTf32, kBf16HiLo, kF32 };

constexpr int M = kNumStreams;
constexpr int kTile = 8;           // Tokens of one mma.
constexpr int kBlockColumns = 64;  // Of hidden.
constexpr int kWarpColumns = 32;   // A warp: these of one destination stream.
constexpr int kMixWarps = kBlockColumns / kWarpColumns * M;
constexpr int kThreads = kMixWarps * kWarpLanes;
constexpr int kStages = 4;
constexpr int kGates = M + M * M;  // post and comb of a token.

template <typename T>
struct Params {
  const T* y;                // [tokens, hidden], rows y_stride apart
  const T* streams;          // [tokens, 4 * hidden], rows streams_stride apart
  T* out;                    // [tokens, 4 * hidden], rows out_stride apart; may be streams
  const float* post_in;      // [tokens, 4], rows post_in_stride apart
  const float* comb_in;      // [tokens, 16], rows comb_in_stride apart
  const uint8_t* fn;         // [mixes, 4 * hidden] f32, kMmaTiles
  const float* scale;        // [3] or [1]
  const float* base;         // [mixes]
  const float* norm_weight;  // [hidden], or null: x is not normed
  T* x;                      // [tokens, hidden], rows x_stride apart
  float* post;               // [tokens, 4], rows post_stride apart; may be post_in
  float* comb;               // [tokens, 16], rows comb_stride apart; may be comb_in
  float* partials;           // [tokens][hidden / kBlockColumns][mixes + 1]
  int64_t y_stride, streams_stride, out_stride, post_in_stride, comb_in_stride;
  int64_t x_stride, post_stride, comb_stride;
  int64_t tokens, hidden;
  int iterations;
  float epsilon, hc_epsilon, norm_epsilon;
};

// ---- Shared memory.

// Of one row of a stage, so that eight lanes read 16 bytes each from different banks.
template <typename T>
constexpr int Pitch() {
  return kBlockColumns * int{sizeof(T)} + (sizeof(T) == 2 ? 64 : 16);
}
constexpr int Sources(bool has_post) { return has_post ? M + 1 : M; }
template <typename T>
constexpr int StageBytes(bool has_post) {
  return Sources(has_post) * kTile * Pitch<T>() + (has_post ? kTile * kGates * 4 : 0);
}
constexpr int SumsBytes(int mixes) { return 2 * kMixWarps * kTile * (mixes + 1) * 4; }

// ---- Values.

__device__ __forceinline__ void Unpack8(const uint4& words, float (&v)[8]) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = LowBf16(w[i]);
    v[2 * i + 1] = HighBf16(w[i]);
  }
}
__device__ __forceinline__ uint4 Pack8(const float (&v)[8]) {
  return make_uint4(Bf16Pair(v[0], v[1]), Bf16Pair(v[2], v[3]), Bf16Pair(v[4], v[5]),
                    Bf16Pair(v[6], v[7]));
}

// Eight consecutive values at a 16-aligned address.
__device__ __forceinline__ void Load8(const uint16_t* p, float (&v)[8]) {
  Unpack8(*reinterpret_cast<const uint4*>(p), v);
}
__device__ __forceinline__ void Load8(const float* p, float (&v)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
// Eight values of the bf16 grid, and the same packed.
__device__ __forceinline__ void Store8(uint16_t* p, const float (&)[8], const uint4& packed) {
  *reinterpret_cast<uint4*>(p) = packed;
}
__device__ __forceinline__ void Store8(float* p, const float (&v)[8], const uint4&) {
  reinterpret_cast<float4*>(p)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(p)[1] = make_float4(v[4], v[5], v[6], v[7]);
}
// Rounds to the grid.
__device__ __forceinline__ uint4 Round8(float (&v)[8]) {
  const uint4 packed = Pack8(v);
  Unpack8(packed, v);
  return packed;
}

// ---- fn.

// What one lane multiplies: of row tiles 0 and 1 the words of A for eight columns, which are the
// lane's own 8 t .. 8 t + 7 of the warp's 32. Which columns meet in one mma does not matter to a
// sum, so they are those that lie together in memory.
template <Precision kPrecision>
struct Weights {
  static constexpr int kTerms = kPrecision == Precision::kF32        ? 3
                                : kPrecision == Precision::kBf16HiLo ? 2
                                                                     : 1;
  static constexpr int kSteps = kPrecision == Precision::kTf32 ? 4 : 2;
  uint32_t tile0[kSteps][kTerms][4];
  uint32_t tile1[kSteps][kTerms][2];  // Rows 24 to 31 are zero.
};

// The next bf16 term of a pair; leaves what it does not say.
__device__ __forceinline__ uint32_t TakeTerm(float* low, float* high) {
  const uint32_t word = Bf16Pair(*low, *high);
  *low -= LowBf16(word);
  *high -= HighBf16(word);
  return word;
}
__device__ __forceinline__ uint32_t RoundTf32(float x) {
  return (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
}

// The 64 bytes of rows g and g + 8 of one tile: [4][row g, row g + 8 of column c, of column c + 4].
__device__ __forceinline__ void LoadRows(const uint8_t* p, float (&low)[8], float (&high)[8]) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const uint4 words = LoadStream16(p + 16 * c);
    low[c] = __uint_as_float(words.x);
    high[c] = __uint_as_float(words.y);
    low[c + 4] = __uint_as_float(words.z);
    high[c + 4] = __uint_as_float(words.w);
  }
}

// Rows g, g + 8 and 16 + g of a lane's eight columns, as loaded.
struct RawWeights {
  float a[8], b[8], c[8];
};

// Those of the warp's columns and stream.
template <int kMixes>
__device__ __forceinline__ RawWeights LoadWeights(const uint8_t* fn, int64_t hidden) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  RawWeights raw = {};
  const int64_t column = int64_t{blockIdx.x} * kBlockColumns + warp / M * kWarpColumns;
  const int64_t tile = (warp % M * hidden + column) / 8 + lane % 4;
  LoadRows(fn + tile * 512 + lane / 4 * 64, raw.a, raw.b);
  if constexpr (kMixes > 16) {
    float none[8];
    LoadRows(fn + (M * hidden / 8 + tile) * 512 + lane / 4 * 64, raw.c, none);
  }
  return raw;
}

template <Precision kPrecision>
__device__ __forceinline__ void SplitWeights(RawWeights& raw, Weights<kPrecision>* out) {
  float(&a)[8] = raw.a;
  float(&b)[8] = raw.b;
  float(&c)[8] = raw.c;
  if constexpr (kPrecision == Precision::kTf32) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      out->tile0[s][0][0] = RoundTf32(a[2 * s]);
      out->tile0[s][0][1] = RoundTf32(b[2 * s]);
      out->tile0[s][0][2] = RoundTf32(a[2 * s + 1]);
      out->tile0[s][0][3] = RoundTf32(b[2 * s + 1]);
      out->tile1[s][0][0] = RoundTf32(c[2 * s]);
      out->tile1[s][0][1] = RoundTf32(c[2 * s + 1]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int term = 0; term < Weights<kPrecision>::kTerms; ++term) {
        out->tile0[s][term][0] = TakeTerm(a + 4 * s, a + 4 * s + 1);
        out->tile0[s][term][1] = TakeTerm(b + 4 * s, b + 4 * s + 1);
        out->tile0[s][term][2] = TakeTerm(a + 4 * s + 2, a + 4 * s + 3);
        out->tile0[s][term][3] = TakeTerm(b + 4 * s + 2, b + 4 * s + 3);
        out->tile1[s][term][0] = TakeTerm(c + 4 * s, c + 4 * s + 1);
        out->tile1[s][term][1] = TakeTerm(c + 4 * s + 2, c + 4 * s + 3);
      }
    }
  }
}

// sums[row tile] += fn v of the warp's columns; v holds the lane's eight columns of token g, and
// `packed` the same.
template <Precision kPrecision, int kMixes>
__device__ __forceinline__ void Multiply(const Weights<kPrecision>& w, const float (&v)[8],
                                         const uint4& packed, float (&sums)[2][4]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int s = 0; s < Weights<kPrecision>::kSteps; ++s) {
    uint32_t b[2] = {words[2 * s % 4], words[(2 * s + 1) % 4]};
    if constexpr (kPrecision == Precision::kTf32) {
      b[0] = __float_as_uint(v[2 * s]);
      b[1] = __float_as_uint(v[2 * s + 1]);
    }
#pragma unroll
    for (int term = 0; term < Weights<kPrecision>::kTerms; ++term) {
      const uint32_t tile1[4] = {w.tile1[s][term][0], 0, w.tile1[s][term][1], 0};
      if constexpr (kPrecision == Precision::kTf32) {
        MmaTf32(sums[0], w.tile0[s][term], b);
        if constexpr (kMixes > 16) MmaTf32(sums[1], tile1, b);
      } else {
        MmaBf16(sums[0], w.tile0[s][term], b);
        if constexpr (kMixes > 16) MmaBf16(sums[1], tile1, b);
      }
    }
  }
}

// ---- The pass over the tiles.

// Starts the copies of a tile into `stage`: rows of the block's columns of each source, and the
// gates of each token. Tokens past the last read as zero; past the last tile nothing is copied.
template <typename T, bool kHasPost>
__device__ __forceinline__ void CopyTile(const Params<T>& p, int tile, unsigned char* stage) {
  constexpr int kChunks = kBlockColumns * int{sizeof(T)} / 16;
  constexpr int kSources = Sources(kHasPost);
  const int64_t token0 = int64_t{tile} * kTile;
  const int64_t left = p.tokens - token0;
  if (left > 0) {
    const int64_t column = int64_t{blockIdx.x} * kBlockColumns;
    for (int i = static_cast<int>(threadIdx.x); i < kSources * kTile * kChunks; i += kThreads) {
      const int chunk = i % kChunks;
      const int row = i / kChunks;
      const int source = row / kTile;
      const int u = row % kTile;
      const int64_t token = u < left ? token0 + u : token0;
      const T* from = source < M ? p.streams + token * p.streams_stride + source * p.hidden + column
                                 : p.y + token * p.y_stride + column;
      CopyAsync16(stage + row * Pitch<T>() + 16 * chunk, from + chunk * (16 / int{sizeof(T)}),
                  u < left ? 16 : 0);
    }
    if constexpr (kHasPost) {
      unsigned char* gates = stage + kSources * kTile * Pitch<T>();
      for (int i = static_cast<int>(threadIdx.x); i < kTile * (1 + M); i += kThreads) {
        const int u = i / (1 + M);
        const int part = i % (1 + M);
        const int64_t token = u < left ? token0 + u : token0;
        const float* from = part == 0 ? p.post_in + token * p.post_in_stride
                                      : p.comb_in + token * p.comb_in_stride + M * (part - 1);
        CopyAsync16(gates + 16 * i, from, u < left ? 16 : 0);
      }
    }
  }
  CommitCopies();
}

// The new stream j of the `left` tokens from token0 on, in the warp's columns: to `out`, and
// into the sums of the mixes and squares. `sums` [kTile][kMixes + 1] is the warp's own.
template <typename T, Precision kPrecision, int kMixes, bool kHasPost>
__device__ __forceinline__ void MixTile(const Params<T>& p, const Weights<kPrecision>& weights,
                                        int64_t token0, int64_t left, const unsigned char* stage,
                                        float* sums) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int g = static_cast<int>(threadIdx.x) % kWarpLanes / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const int j = warp % M;
  const int column = warp / M * kWarpColumns + 8 * t;
  const auto row = [&](int source) {
    return reinterpret_cast<const T*>(stage + (source * kTile + g) * Pitch<T>()) + column;
  };
  float v[8];
  uint4 packed;
  if constexpr (kHasPost) {
    const auto* gates =
        reinterpret_cast<const float*>(stage + Sources(true) * kTile * Pitch<T>()) + g * kGates;
    float y[8];
    Load8(row(M), y);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = gates[j] * y[i];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      float old[8];
      Load8(row(m), old);
      const float share = gates[M + m * M + j];
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = fmaf(share, old[i], v[i]);
    }
    packed = Round8(v);
    if (g < left) {
      T* to = p.out + (token0 + g) * p.out_stride + j * p.hidden;
      Store8(to + int64_t{blockIdx.x} * kBlockColumns + column, v, packed);
    }
  } else {
    Load8(row(j), v);
    packed = Pack8(v);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) squares = fmaf(v[i], v[i], squares);
  squares += __shfl_xor_sync(kFullWarp, squares, 1);
  squares += __shfl_xor_sync(kFullWarp, squares, 2);
  float c[2][4] = {};
  Multiply<kPrecision, kMixes>(weights, v, packed, c);
  constexpr int kRow = kMixes + 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int mix = g + (i >= 2 ? 8 : 0);
    const int u = 2 * t + i % 2;
    if (mix < kMixes) sums[u * kRow + mix] = c[0][i];
    if (i < 2 && 16 + mix < kMixes) sums[u * kRow + 16 + mix] = c[1][i];
  }
  if (t == 0) sums[g * kRow + kMixes] = squares;
}

// Adds up the warps' sums of a tile, in their order, into `partials`.
template <typename T, int kMixes>
__device__ __forceinline__ void AddWarps(const Params<T>& p, int tile, const float* sums) {
  constexpr int kRow = kMixes + 1;
  const int64_t token0 = int64_t{tile} * kTile;
  const int64_t left = p.tokens - token0;
  for (int i = static_cast<int>(threadIdx.x); i < kTile * kRow; i += kThreads) {
    const int u = i / kRow;
    if (u >= left) break;
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kMixWarps; ++w) total += sums[w * kTile * kRow + i];
    p.partials[((token0 + u) * gridDim.x + blockIdx.x) * kRow + i % kRow] = total;
  }
}

// Blocks of a multiprocessor at once, as far as registers go. Shared memory leaves sm_120 but one.
constexpr int MinBlocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return 1;
#else
  return 2;
#endif
}

// Grid: [hidden / kBlockColumns, rows of blocks that share the tiles]. Block: kThreads. Shared
// memory: kStages * StageBytes + SumsBytes, dynamic. Requires hidden % kBlockColumns == 0, rows
// aligned to 16 bytes, fn in kMmaTiles.
template <typename T, Precision kPrecision, int kMixes, bool kHasPost>
__global__ __launch_bounds__(kThreads, (MinBlocks())) void MixTiles(Params<T> p) {
  constexpr int kStage = StageBytes<T>(kHasPost);
  constexpr int kSums = kMixWarps * kTile * (kMixes + 1);
  unsigned char* stages = DynamicShared();
  auto* sums = reinterpret_cast<float*>(stages + kStages * kStage);
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;

  LetSuccessorStart();
  RawWeights raw = LoadWeights<kMixes>(p.fn, p.hidden);
  WaitForPredecessor();
  const int step = static_cast<int>(gridDim.y);
  const int tiles = static_cast<int>((p.tokens + kTile - 1) / kTile);
  int next = static_cast<int>(blockIdx.y);
  for (int stage = 0; stage < kStages - 1; ++stage, next += step) {
    CopyTile<T, kHasPost>(p, next, stages + stage * kStage);
  }
  Weights<kPrecision> weights;
  SplitWeights(raw, &weights);
  int n = 0;  // Tiles so far.
  for (int tile = static_cast<int>(blockIdx.y); tile < tiles; tile += step, next += step, ++n) {
    WaitForCopies<kStages - 2>();
    __syncthreads();  // The tile is here, and all are done with the one before.
    CopyTile<T, kHasPost>(p, next, stages + (n + kStages - 1) % kStages * kStage);
    if (n > 0) AddWarps<T, kMixes>(p, tile - step, sums + (n - 1) % 2 * kSums);
    const int64_t token0 = int64_t{tile} * kTile;
    MixTile<T, kPrecision, kMixes, kHasPost>(p, weights, token0, p.tokens - token0,
                                             stages + n % kStages * kStage,
                                             sums + n % 2 * kSums + warp * kTile * (kMixes + 1));
  }
  __syncthreads();
  const int last = static_cast<int>(blockIdx.y) + (n - 1) * step;
  if (n > 0) AddWarps<T, kMixes>(p, last, sums + (n - 1) % 2 * kSums);
  WaitForCopies<0>();
}

}  // namespace isthmus::kernels::mix
