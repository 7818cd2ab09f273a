// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of the gate share: their arguments, a score, and the order of a choice.
#pragma once

#include <bit>

#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/gate/gate_variants.h"

namespace isthmus::kernels {

// Larger: chosen earlier. Above: the value, NaN lowest of all; below: the smaller id first.
__device__ inline uint64_t ChoiceKey(float value, int64_t e) {
  const auto low = ~static_cast<uint32_t>(e);
  if (isnan(value)) return low;
  const auto bits = std::bit_cast<uint32_t>(value + 0.0f);  // -0 becomes +0: they are equal.
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return uint64_t{order} << 32 | low;
}
__device__ inline int32_t ExpertOfKey(uint64_t key) {
  return static_cast<int32_t>(~static_cast<uint32_t>(key));
}
// The largest key of the warp, in two steps, as the instruction takes words.
__device__ inline uint64_t WarpLargest(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  const uint32_t best = __reduce_max_sync(kFullWarp, high);
  const uint32_t low = high == best ? static_cast<uint32_t>(key) : 0;
  return uint64_t{best} << 32 | __reduce_max_sync(kFullWarp, low);
}

struct GateParams {
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
__device__ inline int32_t HashExpert(const GateParams& args, int64_t token, int i) {
  if (token < 0 || token >= args.vocab) return -1;
  const int64_t e = args.hash_ids[token * args.k + i];
  return e < 0 || e >= args.experts ? -1 : static_cast<int32_t>(e);
}

// A function of its own, as around the f64 division ptxas spills what the caller keeps.
__device__ __noinline__ inline float ScoreOf(float logit) { return SqrtSoftplus(logit); }

// ---- The host's part

inline GateParams GateParamsOf(const GateArgs& args) {
  const bool hash = !args.hash_ids.empty();
  return {.logits = args.logits.f32(0),
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
}

}  // namespace isthmus::kernels
