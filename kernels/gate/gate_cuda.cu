// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of gate, any architecture: a block per token, a thread per expert, so that
// the f64 scores, some 900 cycles of dependent instructions each, are computed once and side by
// side. One warp then chooses from shared memory: the largest key below the one chosen before it, k
// times, so nothing is marked. The same operations as the CPU path, so the same bits. Bound by
// latency: two loads, a score and k rounds of two reductions, about 3 us.
//
// Letters: t token, e expert, i rank.
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/gate/gate_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;

// Larger: chosen earlier. Above: the value, NaN lowest of all; below: the smaller id first.
__device__ uint64_t ChoiceKey(float value, int64_t e) {
  const auto low = ~static_cast<uint32_t>(e);
  if (isnan(value)) return low;
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0: they are equal.
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | low;
}
__device__ int32_t ExpertOfKey(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}
// The largest key of the warp, in two steps, as the instruction takes words.
__device__ uint64_t WarpLargest(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kFullWarp, high);
  const uint32_t low = high == best ? static_cast<uint32_t>(key) : 0;
  return uint64_t{best} << 32 | __reduce_max_sync(kFullWarp, low);
}

struct GateKernelArgs {
  const float* logits;       // [tokens, experts], rows logits_stride apart
  float* scores;             // [tokens, experts], rows scores_stride apart; may be logits
  const float* bias;         // [experts], or null in hash layers
  const int64_t* hash_ids;   // [vocab, k], or null
  const int32_t* token_ids;  // [tokens], or null
  int32_t* ids;              // [tokens, k]
  float* weights;            // [tokens, k]
  int64_t logits_stride, scores_stride, vocab;
  int experts, k;
  float route_scale;
};

// Expert of rank i of the table's row; -1 for a row or an entry that the table does not have.
__device__ int32_t HashExpert(const GateKernelArgs& args, int64_t token, int i) {
  if (token < 0 || token >= args.vocab) return -1;
  const int64_t e = args.hash_ids[token * args.k + i];
  return e < 0 || e >= args.experts ? -1 : static_cast<int32_t>(e);
}

// A function of its own, as around the f64 division ptxas spills what the caller keeps.
__device__ __noinline__ float ScoreOf(float logit) { return SqrtSoftplus(logit); }

// ids <- the experts of token t, best first. By one warp; every lane ends a round with the same
// choice.
__device__ void ChooseExperts(const GateKernelArgs& args, const uint64_t* keys, int lane,
                              int32_t* ids) {
  uint64_t last = ~uint64_t{0};
  for (int i = 0; i < args.k; ++i) {
    uint64_t best = 0;
#pragma unroll 8
    for (int e = lane; e < args.experts; e += kWarpLanes) {
      const uint64_t key = keys[e];
      if (key < last && key > best) best = key;
    }
    last = WarpLargest(best);
    if (lane == 0) ids[i] = ExpertOfKey(last);
  }
}

// Grid: tokens. Block: kThreads. Shared memory: [experts] keys of 8 bytes, then [experts] scores.
__global__ __launch_bounds__(kThreads) void GateBlockPerToken(
    const __grid_constant__ GateKernelArgs args) {
  __shared__ int32_t chosen[kMaxGateK];
  LetSuccessorStart();
  const int64_t t = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  const bool hash = args.hash_ids != nullptr;
  auto* keys = reinterpret_cast<uint64_t*>(DynamicShared());
  auto* a = reinterpret_cast<float*>(keys + args.experts);
  // The bias is a weight, which no kernel writes.
  const float first_bias = !hash && thread < args.experts ? args.bias[thread] : 0.0f;
  WaitForPredecessor();
  const int32_t token = args.token_ids != nullptr ? args.token_ids[t] : 0;
  int32_t* ids = args.ids + t * args.k;
  float* weights = args.weights + t * args.k;
  if (token < 0) {  // Padding.
    for (int i = thread; i < args.k; i += kThreads) {
      ids[i] = -1;
      weights[i] = 0.0f;
    }
    return;
  }
  if (hash && thread < args.k) chosen[thread] = HashExpert(args, token, thread);
  for (int e = thread; e < args.experts; e += kThreads) {
    const float score = ScoreOf(args.logits[t * args.logits_stride + e]);
    args.scores[t * args.scores_stride + e] = score;
    a[e] = score;
    if (!hash) keys[e] = ChoiceKey(score + (e == thread ? first_bias : args.bias[e]), e);
  }
  __syncthreads();
  if (thread >= kWarpLanes) return;
  if (!hash) ChooseExperts(args, keys, thread, chosen);
  __syncwarp();
  float sum = 0.0f;
  for (int i = 0; i < args.k; ++i) {
    if (chosen[i] >= 0) sum += a[chosen[i]];
  }
  if (sum == 0.0f) sum = 1e-20f;
  for (int i = thread; i < args.k; i += kWarpLanes) {
    ids[i] = chosen[i];
    weights[i] = chosen[i] < 0 ? 0.0f : a[chosen[i]] / sum * args.route_scale;
  }
}

}  // namespace

absl::Status LaunchGateCuda(const GateArgs& args, const Exec& exec) {
  if (args.logits.rows == 0) return absl::OkStatus();
  const bool hash = !args.hash_ids.empty();
  const GateKernelArgs kernel_args = {
      .logits = args.logits.f32(0),
      .scores = args.scores.f32(0),
      .bias = hash ? nullptr : args.bias.f32(),
      .hash_ids = hash ? args.hash_ids.data() : nullptr,
      .token_ids = args.token_ids.empty() ? nullptr : args.token_ids.data(),
      .ids = args.ids,
      .weights = args.weights,
      .logits_stride = args.logits.row_stride,
      .scores_stride = args.scores.row_stride,
      .vocab = static_cast<int64_t>(args.hash_ids.size()) / args.k,
      .experts = static_cast<int>(args.logits.cols),
      .k = static_cast<int>(args.k),
      .route_scale = args.route_scale};
  return Launch("GateBlockPerToken",
                {.grid = dim3(static_cast<unsigned>(args.logits.rows)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(args.logits.cols) * 12,
                 .overlaps_predecessor = true},
                exec, GateBlockPerToken, kernel_args);
}

}  // namespace isthmus::kernels
