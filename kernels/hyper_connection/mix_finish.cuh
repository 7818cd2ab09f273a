// SPDX-License-Identifier: Apache-2.0
// The second launch of mix_mma.cuh, a block a token: the sums of all blocks of columns, the gates,
// comb, and x with its norm; and what starts both launches.
//
// Bound by latency: partial sums and new streams come out of L2 at the same time, before anybody
// knows pre; then 20 Sinkhorn passes in one lane run beside the norm. With many tokens bound by L2
// or memory: the new streams once more.
#pragma once

#include "absl/status/status.h"
#include "kernels/core/fast_math.cuh"
#include "kernels/core/workspace.h"
#include "kernels/hyper_connection/mix_mma.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels::mix {

constexpr int kFinishWarps = 16;
constexpr int kFinishThreads = kFinishWarps * kWarpLanes;  // That make x; one more warp makes comb.

template <int kMixes>
struct FinishShared {
  float partial[kFinishWarps][kMixes + 1];
  float squares[kFinishWarps];  // Of x.
  float pre[M];
  float logits[M * M];  // Of comb.
};

// Each warp adds up every kFinishWarps-th block's sums of the token.
template <typename T, int kMixes>
__device__ __forceinline__ float AddBlocks(const Params<T>& p, int64_t token) {
  constexpr int kRow = kMixes + 1;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int blocks = static_cast<int>(p.hidden / kBlockColumns);
  if (warp >= kFinishWarps || lane >= kRow) return 0.0f;
  const float* from = p.partials + token * blocks * kRow + lane;
  float total = 0.0f;
#pragma unroll 4
  for (int b = warp; b < blocks; b += kFinishWarps) total += __ldcg(from + int64_t{b} * kRow);
  return total;
}

// One mix of the token, from the sums of the warps: pre and the logits of comb into shared memory,
// post to its matrix.
template <typename T, int kMixes>
__device__ __forceinline__ void SplitMix(const Params<T>& p, int64_t token, int mix, float scale,
                                         float base, FinishShared<kMixes>& shared) {
  float total = 0.0f;
  float squares = 0.0f;
#pragma unroll
  for (int w = 0; w < kFinishWarps; ++w) {
    total += shared.partial[w][mix];
    squares += shared.partial[w][kMixes];
  }
  const float r = 1.0f / sqrtf(squares / static_cast<float>(M * p.hidden) + p.epsilon);
  const float logit = r * total * scale + base;
  if (mix >= 2 * M) {
    shared.logits[mix - 2 * M] = logit;
    return;
  }
  const float gate = Sigmoid(logit);
  if (mix < M) {
    shared.pre[mix] = gate + p.hc_epsilon;
  } else {
    p.post[token * p.post_stride + mix - M] = gate + gate;
  }
}

// Divides the lines of c (rows: start 4, step 1; columns: start 1, step 4) by their sums, by the
// approximate reciprocal: the passes contract its error.
__device__ __forceinline__ void DivideLines(int start, int step, float epsilon, float (&c)[M * M]) {
#pragma unroll
  for (int line = 0; line < M; ++line) {
    const int at = line * start;
    const float sum = ((c[at] + c[at + step]) + (c[at + 2 * step] + c[at + 3 * step])) + epsilon;
    const float inverse = FastReciprocal(sum);
#pragma unroll
    for (int i = 0; i < M; ++i) c[at + i * step] *= inverse;
  }
}

// The softmax of the rows of comb, an element a lane (and again in lane i + 16), in place. One
// warp.
__device__ __forceinline__ void Softmax(float epsilon, float* logits) {
  const int i = static_cast<int>(threadIdx.x) % (M * M);
  float c = logits[i];
  float largest = fmaxf(c, __shfl_xor_sync(kFullWarp, c, 1));
  largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, 2));
  c = Exp(c - largest);
  float sum = c + __shfl_xor_sync(kFullWarp, c, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  __syncwarp();  // Lane i + 16 has read what lane i overwrites.
  if (threadIdx.x % kWarpLanes < M * M) logits[i] = c / sum + epsilon;
  __syncwarp();
}

// comb of the token, from the softmax: by one lane, all sixteen numbers in registers.
template <typename T>
__device__ __forceinline__ void Balance(const Params<T>& p, int64_t token, const float* softmax) {
  float c[M * M];
#pragma unroll
  for (int i = 0; i < M * M; ++i) c[i] = softmax[i];
  DivideLines(1, M, p.hc_epsilon, c);
  for (int pass = 1; pass < p.iterations; ++pass) {
    DivideLines(M, 1, p.hc_epsilon, c);
    DivideLines(1, M, p.hc_epsilon, c);
  }
  auto* to = reinterpret_cast<float4*>(p.comb + token * p.comb_stride);
#pragma unroll
  for (int i = 0; i < M; ++i) {
    to[i] = make_float4(c[M * i], c[M * i + 1], c[M * i + 2], c[M * i + 3]);
  }
}

// The four streams in eight columns of a token, as loaded.
struct Eight {
  float v[M][8];
};
template <typename T>
__device__ __forceinline__ Eight LoadEight(const T* streams, int64_t hidden) {
  Eight eight;
#pragma unroll
  for (int m = 0; m < M; ++m) Load8(streams + m * hidden, eight.v[m]);
  return eight;
}

// Of x: round(sum_m pre[m] v[m]), m ascending.
__device__ __forceinline__ uint4 Combine(const Eight& eight, const float* pre, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = pre[0] * eight.v[0][i];
#pragma unroll
    for (int m = 1; m < M; ++m) x[i] = fmaf(pre[m], eight.v[m][i], x[i]);
  }
  return Round8(x);
}

// x of the token, normed when there is a weight; `eight` and `weight` are those of the thread's
// first columns. kept[hidden] is shared memory.
template <typename T>
__device__ __forceinline__ void WriteX(const Params<T>& p, int64_t token, const Eight& eight,
                                       const float (&weight)[8], const float* pre, float* sums,
                                       uint16_t* kept) {
  constexpr int64_t kStep = 8 * kFinishThreads;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t begin = 8 * int64_t{threadIdx.x};
  const T* streams = p.out + token * p.out_stride;
  T* to = p.x + token * p.x_stride;
  float squares = 0.0f;
  for (int64_t d = begin; d < p.hidden; d += kStep) {
    float x[8];
    const uint4 packed = Combine(d == begin ? eight : LoadEight(streams + d, p.hidden), pre, x);
    if (p.norm_weight == nullptr) {
      Store8(to + d, x, packed);
      continue;
    }
    *reinterpret_cast<uint4*>(kept + d) = packed;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares = fmaf(x[i], x[i], squares);
  }
  if (p.norm_weight == nullptr) return;
  squares = WarpSum(squares);
  if (threadIdx.x % kWarpLanes == 0) sums[warp] = squares;
  SyncThreads(1, kFinishThreads);
  float total = 0.0f;
#pragma unroll
  for (int w = 0; w < kFinishWarps; ++w) total += sums[w];
  const float scale = 1.0f / sqrtf(total / static_cast<float>(p.hidden) + p.norm_epsilon);
  for (int64_t d = begin; d < p.hidden; d += kStep) {
    float x[8], later[8];
    Load8(kept + d, x);
    if (d != begin) Load8(p.norm_weight + d, later);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = x[i] * scale * (d == begin ? weight[i] : later[i]);
    const uint4 packed = Round8(x);
    Store8(to + d, x, packed);
  }
}

// Grid: tokens. Block: kFinishThreads + kWarpLanes. Shared memory: hidden * 2 bytes, dynamic, for
// the x that is still to be normed. Requires what MixTiles does.
template <typename T, int kMixes>
__global__ __launch_bounds__(kFinishThreads + kWarpLanes) void FinishTokens(Params<T> p) {
  __shared__ FinishShared<kMixes> shared;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarpLanes;
  const int64_t token = blockIdx.x;
  const int64_t column = 8 * int64_t{thread};
  const bool has_columns = warp < kFinishWarps && column < p.hidden;

  LetSuccessorStart();
  const float mix_scale = thread < kMixes ? p.scale[thread < M ? 0 : thread < 2 * M ? 1 : 2] : 0.0f;
  const float mix_base = thread < kMixes ? p.base[thread] : 0.0f;
  float weight[8] = {};
  if (p.norm_weight != nullptr && has_columns) Load8(p.norm_weight + column, weight);
  WaitForPredecessor();
  Eight eight = {};
  if (has_columns) eight = LoadEight(p.out + token * p.out_stride + column, p.hidden);
  const float sum = AddBlocks<T, kMixes>(p, token);
  if (warp < kFinishWarps && thread % kWarpLanes <= kMixes) {
    shared.partial[warp][thread % kWarpLanes] = sum;
  }
  __syncthreads();
  if (thread < kMixes) SplitMix<T, kMixes>(p, token, thread, mix_scale, mix_base, shared);
  __syncthreads();
  if (warp < kFinishWarps) {
    WriteX(p, token, eight, weight, shared.pre, shared.squares,
           reinterpret_cast<uint16_t*>(DynamicShared()));
  } else if constexpr (kMixes == kNumMixes) {
    Softmax(p.hc_epsilon, shared.logits);
    if (thread == kFinishThreads) Balance(p, token, shared.logits);
  }
}

// Rows of blocks: so many that the blocks that run at once, `slots`, are nearly all of use, and no
// more, since each loads the weights of its columns once.
inline int64_t BlockRows(int64_t tiles, int64_t blocks, int64_t slots) {
  int64_t best = 1;
  double best_share = 0.0;
  for (int64_t rows = 1; rows <= 16 && rows <= tiles && best_share < 0.9; ++rows) {
    const int64_t waves = (rows * blocks + slots - 1) / slots;
    const double share = static_cast<double>(rows * blocks) / static_cast<double>(waves * slots);
    if (share > best_share) {
      best = rows;
      best_share = share;
    }
  }
  return best;
}

// Fills in what `params` lacks (partials) and launches.
template <typename T, Precision kPrecision, int kMixes, bool kHasPost>
absl::Status LaunchMix(Params<T> params, const Exec& exec) {
  if (params.tokens == 0) return absl::OkStatus();
  const int64_t blocks = params.hidden / kBlockColumns;
  Workspace::Scope scope(exec.workspace);
  params.partials = scope.Take<float>(params.tokens * blocks * (kMixes + 1));
  const int64_t bytes = kStages * StageBytes<T>(kHasPost) + SumsBytes(kMixes);
  const int64_t slots = int64_t{exec.num_sms} * (exec.arch >= kArchSm120 ? 1 : 2);
  const int64_t rows = BlockRows(CeilDiv(params.tokens, kTile), blocks, slots);
  ISTHMUS_RETURN_IF_ERROR(
      Launch("MixTiles",
             {.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(rows)),
              .block = dim3(kThreads),
              .shared_bytes = static_cast<size_t>(bytes),
              .overlaps_predecessor = true},
             exec, MixTiles<T, kPrecision, kMixes, kHasPost>, params));
  return Launch("FinishTokens",
                {.grid = dim3(static_cast<unsigned>(params.tokens)),
                 .block = dim3(kFinishThreads + kWarpLanes),
                 .shared_bytes = static_cast<size_t>(2 * params.hidden),
                 .overlaps_predecessor = true},
                exec, FinishTokens<T, kMixes>, params);
}

}  // namespace isthmus::kernels::mix
