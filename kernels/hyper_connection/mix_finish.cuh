// SPDX-License-Identifier: Apache-2.0
// The second half of mix_mma.cuh: what the last block to come to a group does with the sums of all,
// and the kernel with its launch.
#pragma once

#include "absl/status/status.h"
#include "kernels/core/workspace.h"
#include "kernels/hyper_connection/mix_mma.cuh"

namespace isthmus::kernels::mix {

// What the last block keeps in shared memory (FinishBytes).
struct Finish {
  float* pre;      // [kMaxGroup][4]
  float* logits;   // [kMaxGroup][kLogitPitch]
  float* squares;  // [2][kMixWarps]
  float* weight;   // [hidden], of the norm, when a group is one token
  float* partial;  // [group][kMixWarps][mixes + 1]
  uint16_t* x;     // [tokens at a time][hidden], in the place of `partial`
};

// scale and base of each mix, in shared memory.
template <int kMixes>
struct GateNumbers {
  float scale[kMixes];
  float base[kMixes];
};

template <typename T>
__device__ __forceinline__ Finish FinishIn(const Params<T>& p, unsigned char* shared) {
  auto* floats = reinterpret_cast<float*>(shared);
  float* logits = floats + kMaxGroup * M;
  float* squares = logits + kMaxGroup * kLogitPitch;
  float* weight = floats + kGateFloats;
  float* rest = weight + WeightFloats(p.hidden, p.group);
  return {floats, logits, squares, weight, rest, reinterpret_cast<uint16_t*>(rest)};
}

// Each warp adds up every kMixWarps-th block's sums of every token of the group.
template <typename T, int kMixes>
__device__ __forceinline__ void AddBlocks(const Params<T>& p, int64_t first, int count,
                                          const Finish& finish) {
  constexpr int kRow = kMixes + 1;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (warp >= kMixWarps || lane >= kRow) return;
  const int blocks = static_cast<int>(gridDim.x);
  for (int u = 0; u < count; ++u) {
    const float* from = p.partials + (first + u) * blocks * kRow + lane;
    float total = 0.0f;
#pragma unroll 8
    for (int b = warp; b < blocks; b += kMixWarps) total += __ldcg(from + int64_t{b} * kRow);
    finish.partial[(u * kMixWarps + warp) * kRow + lane] = total;
  }
}

// From the sums of the warps: pre and the logits of comb into shared memory, post to its matrix.
template <typename T, int kMixes>
__device__ __forceinline__ void SplitMixesOf(const Params<T>& p, const GateNumbers<kMixes>& numbers,
                                             int64_t first, int count, const Finish& finish) {
  constexpr int kRow = kMixes + 1;
  for (int i = static_cast<int>(threadIdx.x); i < count * kMixes; i += kThreads) {
    const int u = i / kMixes;
    const int mix = i % kMixes;
    const float* sums = finish.partial + u * kMixWarps * kRow;
    float total = 0.0f;
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kMixWarps; ++w) {
      total += sums[w * kRow + mix];
      squares += sums[w * kRow + kMixes];
    }
    const float r = 1.0f / sqrtf(squares / static_cast<float>(M * p.hidden) + p.epsilon);
    const int kind = mix < M ? 0 : mix < 2 * M ? 1 : 2;
    const float logit = r * total * numbers.scale[mix] + numbers.base[mix];
    if (kind == 2) {
      finish.logits[u * kLogitPitch + mix - 2 * M] = logit;
      continue;
    }
    const float gate = Sigmoid(logit);
    if (kind == 0) {
      finish.pre[u * M + mix] = gate + p.hc_epsilon;
    } else {
      p.post[(first + u) * p.post_stride + mix - M] = gate + gate;
    }
  }
}

// Divides the lines of c (rows: start 4, step 1; columns: start 1, step 4) by their sums, by the
// approximate reciprocal: the passes contract its error.
__device__ __forceinline__ void DivideLines(int start, int step, float epsilon, float (&c)[M * M]) {
#pragma unroll
  for (int line = 0; line < M; ++line) {
    const int at = line * start;
    const float sum = ((c[at] + c[at + step]) + (c[at + 2 * step] + c[at + 3 * step])) + epsilon;
    const float inverse = __fdividef(1.0f, sum);
#pragma unroll
    for (int i = 0; i < M; ++i) c[at + i * step] *= inverse;
  }
}

// comb of one token a lane, from its logits: the warp beside those that make x.
template <typename T>
__device__ __forceinline__ void Balance(const Params<T>& p, int64_t first, int count,
                                        const Finish& finish) {
  const int u = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (u >= count) return;
  float c[M * M];
#pragma unroll
  for (int i = 0; i < M * M; ++i) c[i] = finish.logits[u * kLogitPitch + i];
#pragma unroll
  for (int row = 0; row < M * M; row += M) {
    const float largest = fmaxf(fmaxf(c[row], c[row + 1]), fmaxf(c[row + 2], c[row + 3]));
#pragma unroll
    for (int k = 0; k < M; ++k) c[row + k] = Exp(c[row + k] - largest);
    const float sum = (c[row] + c[row + 1]) + (c[row + 2] + c[row + 3]);
#pragma unroll
    for (int k = 0; k < M; ++k) c[row + k] = c[row + k] / sum + p.hc_epsilon;
  }
  DivideLines(1, M, p.hc_epsilon, c);
  for (int pass = 1; pass < p.iterations; ++pass) {
    DivideLines(M, 1, p.hc_epsilon, c);
    DivideLines(1, M, p.hc_epsilon, c);
  }
  auto* to = reinterpret_cast<float4*>(p.comb + (first + u) * p.comb_stride);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    to[i] = make_float4(c[M * i], c[M * i + 1], c[M * i + 2], c[M * i + 3]);
  }
}

// Eight columns of x: round(sum_m pre[m] v[m]), m ascending.
template <typename T>
__device__ __forceinline__ uint4 CombineEight(const T* streams, int64_t hidden, const float* pre,
                                              float (&x)[8]) {
  float v[M][8];
#pragma unroll
  for (int m = 0; m < M; ++m) Load8(streams + m * hidden, v[m]);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = pre[0] * v[0][i];
#pragma unroll
    for (int m = 1; m < M; ++m) x[i] = fmaf(pre[m], v[m][i], x[i]);
  }
  return Round8(x);
}

// x of the group's tokens, normed when there is a weight: a team of warps_per_token warps a token.
// Where the last step reads the new streams of a group, rows stride apart, and the norm's weight.
template <typename T>
struct FinishSources {
  const T* streams;
  int64_t stride;
  const float* norm_weight;
};

// From memory; for a single token, whose latency is all that counts, from shared memory, into which
// they travel while the block adds up: the streams into `stages`, which hold `bytes`, and which
// nobody uses any more when the block has only this group.
template <typename T>
__device__ __forceinline__ FinishSources<T> SourcesOf(const Params<T>& p, int64_t first,
                                                      unsigned char* stages, int64_t bytes,
                                                      const Finish& finish) {
  FinishSources<T> from = {p.out + first * p.out_stride, p.out_stride, p.norm_weight};
  if (p.group != 1 || p.tokens > gridDim.y) return from;
  const int64_t row_bytes = M * p.hidden * int64_t{sizeof(T)};
  const int64_t thread_bytes = 16 * int64_t{threadIdx.x};
  if (row_bytes <= bytes) {
    const auto* row = reinterpret_cast<const unsigned char*>(from.streams);
    for (int64_t at = thread_bytes; at < row_bytes; at += 16 * kThreads) {
      CopyAsync16(stages + at, row + at);
    }
    from.streams = reinterpret_cast<const T*>(stages);
  }
  if (p.norm_weight != nullptr) {
    const auto* weight = reinterpret_cast<const unsigned char*>(p.norm_weight);
    for (int64_t at = thread_bytes; at < 4 * p.hidden; at += 16 * kThreads) {
      CopyAsync16(reinterpret_cast<unsigned char*>(finish.weight) + at, weight + at);
    }
    from.norm_weight = finish.weight;
  }
  return from;
}

// kUnroll: chunks whose loads are on their way together.
template <typename T, int kUnroll>
__device__ __forceinline__ void WriteX(const Params<T>& p, const FinishSources<T>& from,
                                       int64_t first, int count, const Finish& finish) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int teams = kMixWarps / p.warps_per_token;
  const int team = warp / p.warps_per_token;
  const int team_threads = p.warps_per_token * kWarpLanes;
  const int thread = static_cast<int>(threadIdx.x) - team * team_threads;
  uint16_t* kept = finish.x + team * p.hidden;
  for (int u = team, turn = 0; u < count; u += teams, turn ^= 1) {
    const T* streams = from.streams + u * from.stride;
    T* to = p.x + (first + u) * p.x_stride;
    const float* pre = finish.pre + u * M;
    float squares = 0.0f;
#pragma unroll kUnroll
    for (int64_t d = 8 * thread; d < p.hidden; d += 8 * team_threads) {
      float x[8];
      const uint4 packed = CombineEight(streams + d, p.hidden, pre, x);
      if (p.norm_weight == nullptr) {
        Store8(to + d, x, packed);
        continue;
      }
      *reinterpret_cast<uint4*>(kept + d) = packed;
#pragma unroll
      for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
    }
    if (p.norm_weight == nullptr) continue;
    squares = WarpSum(squares);
    // Two sets of sums in turn, so that one barrier a token is enough.
    float* sums = finish.squares + turn * kMixWarps;
    if (threadIdx.x % kWarpLanes == 0) sums[warp] = squares;
    SyncThreads(1 + team, team_threads);
    float total = 0.0f;
    for (int w = 0; w < p.warps_per_token; ++w) total += sums[team * p.warps_per_token + w];
    const float scale = 1.0f / sqrtf(total / static_cast<float>(p.hidden) + p.norm_epsilon);
#pragma unroll 2
    for (int64_t d = 8 * thread; d < p.hidden; d += 8 * team_threads) {
      float x[8], weight[8];
      Load8(kept + d, x);
      Load8(from.norm_weight + d, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * weight[i];
      const uint4 packed = Round8(x);
      Store8(to + d, x, packed);
    }
  }
}

// Into L2 the block's part of the norm's weight, which the last block reads and nobody before.
template <typename T>
__device__ __forceinline__ void PrefetchNorm(const Params<T>& p) {
  constexpr int kSectorFloats = 8;
  const int i = static_cast<int>(threadIdx.x) * kSectorFloats;
  if (p.norm_weight != nullptr && blockIdx.y == 0 && i < kBlockColumns) {
    PrefetchL2(p.norm_weight + int64_t{blockIdx.x} * kBlockColumns + i);
  }
}

// What the last block to come to a group does. All threads; on return shared memory is free again.
template <typename T, int kMixes, int kUnroll>
__device__ __forceinline__ void FinishGroup(const Params<T>& p, const GateNumbers<kMixes>& numbers,
                                            const FinishSources<T>& from, int64_t first, int count,
                                            const Finish& finish) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  AddBlocks<T, kMixes>(p, first, count, finish);
  __syncthreads();
  SplitMixesOf<T, kMixes>(p, numbers, first, count, finish);
  CommitCopies();
  WaitForCopies<0>();  // Of the sources.
  __syncthreads();
  if (warp < kMixWarps) {
    WriteX<T, kUnroll>(p, from, first, count, finish);
  } else if constexpr (kMixes == kNumMixes) {
    Balance(p, first, count, finish);
  }
  __syncthreads();
}

// Blocks of a multiprocessor at once, as far as registers go. Shared memory leaves sm_120 but one.
template <typename T, Precision kPrecision>
constexpr int MinBlocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return 1;
#else
  return sizeof(T) == 4 && kPrecision == Precision::kF32 ? 1 : 2;
#endif
}

// Grid: [hidden / kBlockColumns, rows of blocks that share the groups]. Block: kThreads. Shared
// memory: kStages * StageBytes + SumsBytes + FinishBytes, dynamic. Requires hidden % kBlockColumns
// == 0, rows aligned to 16 bytes, fn in kMmaTiles.
template <typename T, Precision kPrecision, int kMixes, bool kHasPost>
__global__ __launch_bounds__(kThreads, (MinBlocks<T, kPrecision>())) void MixGroups(Params<T> p) {
  __shared__ unsigned turn;
  __shared__ GateNumbers<kMixes> numbers;
  constexpr int kStage = StageBytes<T>(kHasPost);
  constexpr int kSums = kMixWarps * kTile * (kMixes + 1);
  constexpr int kUnroll = sizeof(T) == 2 && kPrecision != Precision::kF32 ? 2 : 1;
  unsigned char* stages = DynamicShared();
  auto* sums = reinterpret_cast<float*>(stages + kStages * kStage);
  const Finish finish = FinishIn(p, stages + kStages * kStage + SumsBytes(kMixes));
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;

  LetSuccessorStart();
  PrefetchNorm(p);
  RawWeights raw = LoadWeights<kMixes>(p.fn, p.hidden);
  const int mix = static_cast<int>(threadIdx.x);
  const float scale = mix < kMixes ? p.scale[mix < M ? 0 : mix < 2 * M ? 1 : 2] : 0.0f;
  const float base = mix < kMixes ? p.base[mix] : 0.0f;
  WaitForPredecessor();
  const int begin = static_cast<int>(blockIdx.y) * p.group;
  Place next = {begin, 0};
  for (int stage = 0; stage < kStages - 1; ++stage) {
    CopyTile<T, kHasPost>(p, next, stages + stage * kStage);
    next = After(p, next);
  }
  Weights<kPrecision> weights;
  SplitWeights(raw, &weights);
  if (mix < kMixes) {  // Not before the copies are on their way; a barrier stands before its use.
    numbers.scale[mix] = scale;
    numbers.base[mix] = base;
  }
  int n = 0;  // Tiles so far.
  for (int first = begin; first < p.tokens; first += static_cast<int>(gridDim.y) * p.group) {
    const int count = TokensOf(p, first);
    for (int u = 0; u < count; u += kTile, ++n) {
      WaitForCopies<kStages - 2>();
      __syncthreads();  // The tile is here, and all are done with the one before.
      CopyTile<T, kHasPost>(p, next, stages + (n + kStages - 1) % kStages * kStage);
      next = After(p, next);
      if (u > 0) AddWarps<T, kMixes>(p, first + u - kTile, kTile, sums + (n - 1) % 2 * kSums);
      if (warp < kMixWarps) {
        MixTile<T, kPrecision, kMixes, kHasPost>(
            p, weights, first + u, count - u, stages + n % kStages * kStage,
            sums + n % 2 * kSums + warp * kTile * (kMixes + 1));
      }
    }
    __syncthreads();
    const int last = (count - 1) / kTile * kTile;
    AddWarps<T, kMixes>(p, first + last, count - last, sums + (n - 1) % 2 * kSums);
    if (TakeTurn(p.counters + first / p.group, gridDim.x, &turn) == gridDim.x - 1) {
      FinishGroup<T, kMixes, kUnroll>(
          p, numbers, SourcesOf(p, first, stages, kStages * kStage, finish), first, count, finish);
    }
  }
  WaitForCopies<0>();
}

// Tokens of a group: more of them, fewer meetings of blocks; fewer, more blocks that finish.
inline int GroupFor(int64_t tokens) {
  if (tokens <= 2) return 1;
  if (tokens <= 8) return 2;
  if (tokens <= 32) return 4;
  if (tokens <= 128) return 8;
  return tokens <= 512 ? 16 : kMaxGroup;
}

// Warps that make x of one token. Few tokens: all that there are. Else so many that the x of all
// tokens at a time fits into shared memory. In batch_invariant mode the batch has no say.
inline int WarpsPerToken(int64_t hidden, int group, bool batch_invariant) {
  const int least = hidden <= 4096 ? 2 : 4;
  const int share = kMixWarps / group;
  return batch_invariant || share < least ? least : share;
}

// Rows of blocks: so many that the blocks that run at once, `slots`, are nearly all of use, and no
// more, since each loads the weights of its columns once.
inline int64_t BlockRows(int64_t groups, int64_t blocks, int64_t slots) {
  int64_t best = 1;
  double best_share = 0.0;
  for (int64_t rows = 1; rows <= 16 && rows <= groups && best_share < 0.9; ++rows) {
    const int64_t waves = (rows * blocks + slots - 1) / slots;
    const double share = static_cast<double>(rows * blocks) / static_cast<double>(waves * slots);
    if (share > best_share) {
      best = rows;
      best_share = share;
    }
  }
  return best;
}

// Fills in what `params` lacks (partials, counters, group, warps) and launches.
template <typename T, Precision kPrecision, int kMixes, bool kHasPost>
absl::Status LaunchMixGroups(Params<T> params, const Exec& exec) {
  if (params.tokens == 0) return absl::OkStatus();
  const int64_t blocks = params.hidden / kBlockColumns;
  Workspace::Scope scope(exec.workspace);
  params.partials = scope.Take<float>(params.tokens * blocks * (kMixes + 1));
  params.counters = exec.counters;
  params.group = GroupFor(params.tokens);
  params.warps_per_token = WarpsPerToken(params.hidden, params.group, exec.batch_invariant);
  const int64_t groups = CeilDiv(params.tokens, params.group);
  if (params.counters == nullptr || groups > kNumCounters) {
    return absl::InvalidArgumentError("hyper_connection: fused launches need Exec::counters");
  }
  const int64_t bytes = kStages * StageBytes<T>(kHasPost) + SumsBytes(kMixes) +
                        FinishBytes(params.hidden, kMixes, params.group, params.warps_per_token);
  // Shared memory of a multiprocessor; a block costs 1 KB more than it asks for.
  const int64_t of_sm = (exec.arch >= kArchSm120 ? 100 : 228) << 10;
  const int64_t fit = of_sm / (bytes + 1024);
  const int64_t of_registers = MinBlocks<T, kPrecision>();
  const int64_t slots = exec.num_sms * (fit < of_registers ? fit : of_registers);
  return Launch("MixGroups",
                {.grid = dim3(static_cast<unsigned>(blocks),
                              static_cast<unsigned>(BlockRows(groups, blocks, slots))),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(bytes),
                 .overlaps_predecessor = true},
                exec, MixGroups<T, kPrecision, kMixes, kHasPost>, params);
}

}  // namespace isthmus::kernels::mix
