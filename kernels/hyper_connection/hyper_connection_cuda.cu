// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of the hyper-connections: a block a token, plain f32, every sum in the
// order of the CPU path, so that its results are the CPU's bit for bit. Bound by latency: the sum
// of squares is a chain of 4 * hidden / 16 dependent additions, which the order asks for.
//
// Letters: t token, m i j stream, d element of hidden, k mix.
#include "kernels/core/weight_tiles.h"
#include "kernels/hyper_connection/hyper_connection_device.cuh"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int M = kNumStreams;
constexpr int kThreads = 256;
constexpr int64_t kGroupColumns = 128;  // Inputs that the CPU's product sums before it adds sums.
constexpr int kSquares = 16;            // Partial sums of squares.

struct MixParams {
  MatrixView streams;  // [tokens, 4 * hidden]
  WeightView fn;       // [kMixes, 4 * hidden]
  const float* scale;  // [3] or [1]
  const float* base;   // [kMixes]
  int iterations;
  float epsilon;
  float hc_epsilon;
  MatrixView x;     // [tokens, hidden], out
  MatrixView post;  // [tokens, 4], out; null data in the stream head
  MatrixView comb;  // [tokens, 16], out; null data in the stream head
  bool round;
};

int64_t MixGroups(int64_t columns) { return (columns + kGroupColumns - 1) / kGroupColumns; }

// Sums of one group of inputs for every mix, then the partial sums of squares: into shared memory,
// group_sums [kMixes][groups] and squares [kSquares].
template <int kMixes>
__device__ void SumGroups(const MixParams& p, int64_t t, int64_t groups, float* group_sums,
                          float* squares) {
  const int64_t columns = p.streams.cols;
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < kSquares) {
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t c = thread; c < columns; c += kSquares) {
      const float v = LoadElement(p.streams, t, c);
      sum = fmaf(v, v, sum);
    }
    squares[thread] = sum;
  }
  for (int64_t i = thread; i < kMixes * groups; i += kThreads) {
    const int64_t k = i / groups;
    const int64_t first = i % groups * kGroupColumns;
    const int64_t end = first + kGroupColumns < columns ? first + kGroupColumns : columns;
    float sum = 0.0f;
#pragma unroll 8
    for (int64_t c = first; c < end; ++c) {
      sum = fmaf(LoadElement(p.streams, t, c), WeightElement(p.fn, k, c), sum);
    }
    group_sums[i] = sum;
  }
}

// rsqrt(mean(v^2) + epsilon) from the partial sums, by the CPU's tree.
__device__ float InverseRms(const float* squares, int64_t columns, float epsilon) {
  float sums[kSquares];
  for (int i = 0; i < kSquares; ++i) sums[i] = squares[i];
  for (int half = kSquares / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return 1.0f / sqrtf(sums[0] / static_cast<float>(columns) + epsilon);
}

// Splits the mixes of token t: pre into shared memory, post and comb to the matrices. One warp.
template <int kMixes>
__device__ void SplitByWarp(const MixParams& p, int64_t t, const float* mixes, float* pre) {
  const int lane = static_cast<int>(threadIdx.x);
  if (lane < M) {
    pre[lane] = Sigmoid(mixes[lane] * p.scale[0] + p.base[lane]) + p.hc_epsilon;
  }
  if constexpr (kMixes == kNumMixes) {
    if (lane < M) {
      const float post = Sigmoid(mixes[M + lane] * p.scale[1] + p.base[M + lane]);
      FloatRow(p.post, t)[lane] = post + post;
    }
    const int i = lane % (M * M);
    const float logit = mixes[2 * M + i] * p.scale[2] + p.base[2 * M + i];
    const float comb = BalanceByWarp(logit, p.iterations, p.hc_epsilon);
    if (lane < M * M) FloatRow(p.comb, t)[i] = comb;
  }
}

// Grid: tokens. Block: kThreads. Shared memory: (kMixes * groups + kSquares) floats, dynamic.
template <int kMixes>
__global__ __launch_bounds__(kThreads, 1) void MixToken(MixParams p) {
  __shared__ float mixes[kMixes];
  __shared__ float pre[M];
  auto* group_sums = reinterpret_cast<float*>(DynamicShared());
  const int64_t t = blockIdx.x;
  const int64_t columns = p.streams.cols;
  const int64_t groups = (columns + kGroupColumns - 1) / kGroupColumns;
  float* squares = group_sums + kMixes * groups;
  const int thread = static_cast<int>(threadIdx.x);

  SumGroups<kMixes>(p, t, groups, group_sums, squares);
  __syncthreads();
  if (thread < kMixes) {
    float total = 0.0f;
    for (int64_t g = 0; g < groups; ++g) total = total + group_sums[thread * groups + g];
    mixes[thread] = InverseRms(squares, columns, p.epsilon) * total;
  }
  __syncthreads();
  if (thread < kWarpLanes) SplitByWarp<kMixes>(p, t, mixes, pre);
  __syncthreads();
  const int64_t hidden = p.x.cols;
  for (int64_t d = thread; d < hidden; d += kThreads) {
    float sum = pre[0] * LoadElement(p.streams, t, d);
    for (int m = 1; m < M; ++m) {
      sum = fmaf(pre[m], LoadElement(p.streams, t, m * hidden + d), sum);
    }
    StoreElement(p.x, t, d, p.round ? RoundBf16(sum) : sum);
  }
}

struct PostParams {
  MatrixView y;        // [tokens, hidden]
  MatrixView streams;  // [tokens, 4 * hidden]
  MatrixView post;     // [tokens, 4]
  MatrixView comb;     // [tokens, 16]
  MatrixView out;      // [tokens, 4 * hidden]; may be streams: a thread reads all that it writes
  bool round;
};

// Grid: [tokens, ceil(hidden / kThreads)]. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void PostToken(PostParams p) {
  const int64_t t = blockIdx.x;
  const int64_t hidden = p.y.cols;
  const int64_t d = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  if (d >= hidden) return;
  const float* post = FloatRow(p.post, t);
  const float* comb = FloatRow(p.comb, t);
  const float y = LoadElement(p.y, t, d);
  float v[M];
  for (int i = 0; i < M; ++i) v[i] = LoadElement(p.streams, t, i * hidden + d);
  for (int j = 0; j < M; ++j) {
    float sum = post[j] * y;
    for (int i = 0; i < M; ++i) sum = fmaf(comb[i * M + j], v[i], sum);
    StoreElement(p.out, t, j * hidden + d, p.round ? RoundBf16(sum) : sum);
  }
}

template <int kMixes>
absl::Status LaunchMix(const MixParams& params, const Exec& exec) {
  const int64_t tokens = params.streams.rows;
  if (tokens == 0) return absl::OkStatus();
  const int64_t floats = kMixes * MixGroups(params.streams.cols) + kSquares;
  return Launch("MixToken",
                {.grid = dim3(static_cast<unsigned>(tokens)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(floats) * sizeof(float)},
                exec, MixToken<kMixes>, params);
}

}  // namespace

absl::Status LaunchHyperConnectionPreCuda(const HyperConnectionPreArgs& args, const Exec& exec) {
  return LaunchMix<kNumMixes>({.streams = args.streams,
                               .fn = args.fn,
                               .scale = args.scale.f32(),
                               .base = args.base.f32(),
                               .iterations = args.sinkhorn_iterations,
                               .epsilon = args.epsilon,
                               .hc_epsilon = args.hc_epsilon,
                               .x = args.x,
                               .post = args.post,
                               .comb = args.comb,
                               .round = args.arithmetic == Arithmetic::kReference},
                              exec);
}

absl::Status LaunchHyperConnectionHeadCuda(const HyperConnectionHeadArgs& args, const Exec& exec) {
  return LaunchMix<kNumStreams>({.streams = args.streams,
                                 .fn = args.fn,
                                 .scale = args.scale.f32(),
                                 .base = args.base.f32(),
                                 .iterations = 0,
                                 .epsilon = args.epsilon,
                                 .hc_epsilon = args.hc_epsilon,
                                 .x = args.x,
                                 .post = {},
                                 .comb = {},
                                 .round = args.arithmetic == Arithmetic::kReference},
                                exec);
}

absl::Status LaunchHyperConnectionPostCuda(const HyperConnectionPostArgs& args, const Exec& exec) {
  if (args.y.rows == 0) return absl::OkStatus();
  return Launch("PostToken",
                {.grid = dim3(static_cast<unsigned>(args.y.rows), CeilDiv(args.y.cols, kThreads)),
                 .block = dim3(kThreads)},
                exec, PostToken,
                PostParams{args.y, args.streams, args.post, args.comb, args.out,
                           args.arithmetic == Arithmetic::kReference});
}

}  // namespace isthmus::kernels
