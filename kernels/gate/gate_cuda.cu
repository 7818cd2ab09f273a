// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of gate, any architecture: a block per token, a thread per expert, so that
// the f64 scores, some 900 cycles of dependent instructions each, are computed once and side by
// side. One warp then chooses from shared memory: the largest key below the one chosen before it, k
// times, so nothing is marked. The same operations as the CPU path, so the same bits. Bound by
// latency: two loads, a score and k rounds of two reductions, about 3 us.
//
// Letters: t token, e expert, i rank.
#include "kernels/gate/gate_device.cuh"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;

// ids <- the experts of token t, best first. By one warp; every lane ends a round with the same
// choice.
__device__ void ChooseExperts(const GateParams& args, const uint64_t* keys, int lane,
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
    const __grid_constant__ GateParams args) {
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
  return Launch("GateBlockPerToken",
                {.grid = dim3(static_cast<unsigned>(args.logits.rows)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(args.logits.cols) * 12,
                 .overlaps_predecessor = true},
                exec, GateBlockPerToken, GateParamsOf(args));
}

}  // namespace isthmus::kernels
