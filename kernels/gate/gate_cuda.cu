// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of gate, any architecture: a warp per token. The chosen expert is the
// largest key below the one chosen before it, k times, so nothing is marked. The same operations as
// the CPU path, so the same bits. Bound by the f64 scores, and by k rounds over them in L1.
//
// Letters: t token, e expert, i rank.
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/gate/gate_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kWarps = 4;  // Tokens of a block.

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
__device__ uint64_t WarpLargest(uint64_t key) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    const auto other = static_cast<uint64_t>(
        __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(key), lanes));
    key = other > key ? other : key;
  }
  return key;
}

struct GateKernelArgs {
  const float* logits;       // [tokens, experts], rows logits_stride apart
  float* scores;             // [tokens, experts], rows scores_stride apart; may be logits
  const float* bias;         // [experts], or null in hash layers
  const int64_t* hash_ids;   // [vocab, k], or null
  const int32_t* token_ids;  // [tokens], or null
  int32_t* ids;              // [tokens, k]
  float* weights;            // [tokens, k]
  int64_t tokens, experts, logits_stride, scores_stride, vocab;
  int k;
  float route_scale;
};

// Expert of rank i of the table's row; -1 for a row or an entry that the table does not have.
__device__ int32_t HashExpert(const GateKernelArgs& args, int64_t token, int i) {
  if (token < 0 || token >= args.vocab) return -1;
  const int64_t e = args.hash_ids[token * args.k + i];
  return e < 0 || e >= args.experts ? -1 : static_cast<int32_t>(e);
}

// A function of its own, as around the f64 division ptxas spills what the caller keeps.
__device__ __noinline__ void ScoreRow(const float* logits, float* a, int lane, int64_t experts) {
  for (int64_t e = lane; e < experts; e += kWarpLanes) a[e] = SqrtSoftplus(logits[e]);
}

// Grid: ceil(tokens / kWarps). Block: kWarps warps. Every lane ends a round with the same choice.
__global__ __launch_bounds__(kWarps* kWarpLanes) void GateWarpPerToken(
    const __grid_constant__ GateKernelArgs args) {
  const int64_t t = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (t >= args.tokens) return;  // Whole warps leave together.
  const float* logits = args.logits + t * args.logits_stride;
  float* a = args.scores + t * args.scores_stride;
  int32_t* ids = args.ids + t * args.k;
  float* weights = args.weights + t * args.k;
  if (args.token_ids != nullptr && args.token_ids[t] < 0) {  // Padding.
    for (int i = lane; i < args.k; i += kWarpLanes) {
      ids[i] = -1;
      weights[i] = 0.0f;
    }
    return;
  }
  ScoreRow(logits, a, lane, args.experts);
  __syncwarp();

  uint64_t last = ~uint64_t{0};
  float sum = 0.0f;
  for (int i = 0; i < args.k; ++i) {
    int32_t chosen = 0;
    if (args.hash_ids != nullptr) {
      chosen = HashExpert(args, args.token_ids[t], i);
    } else {
      uint64_t best = 0;
      for (int64_t e = lane; e < args.experts; e += kWarpLanes) {
        const uint64_t key = ChoiceKey(a[e] + args.bias[e], e);
        if (key < last && key > best) best = key;
      }
      last = WarpLargest(best);
      chosen = ExpertOfKey(last);
    }
    if (lane == 0) ids[i] = chosen;
    if (chosen >= 0) sum += a[chosen];
  }
  if (sum == 0.0f) sum = 1e-20f;
  __syncwarp();
  for (int i = lane; i < args.k; i += kWarpLanes) {
    weights[i] = ids[i] < 0 ? 0.0f : a[ids[i]] / sum * args.route_scale;
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
      .tokens = args.logits.rows,
      .experts = args.logits.cols,
      .logits_stride = args.logits.row_stride,
      .scores_stride = args.scores.row_stride,
      .vocab = static_cast<int64_t>(args.hash_ids.size()) / args.k,
      .k = static_cast<int>(args.k),
      .route_scale = args.route_scale};
  return Launch(
      "GateWarpPerToken",
      {.grid = dim3(CeilDiv(args.logits.rows, kWarps)), .block = dim3(kWarps * kWarpLanes)}, exec,
      GateWarpPerToken, kernel_args);
}

}  // namespace isthmus::kernels
