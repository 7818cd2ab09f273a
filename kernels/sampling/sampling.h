// SPDX-License-Identifier: Apache-2.0
// Next-token choice from logits.
//
//   temperature == 0: arg max, the smaller id among equals (greedy).
//   otherwise: p = softmax(logits / temperature); keep the top_k largest (0: all), then the
//   smallest prefix of them in descending order whose mass reaches top_p of what top_k left, as
//   other engines do; draw by inverse CDF with one uniform number from (seed, counter). Ties in
//   the order by smaller id.
//
// Shapes     logits: [vocab]. One row per call; rows are independent.
// Types      f32 logits, i32 token.
// Numerics   Masses are exp((logit - largest) / temperature) in f32, which no temperature can
//            overflow; their sums f64 in order of rank. Only finite logits can be chosen; none is
//            an error.
// Workspace  20 * vocab bytes; none when greedy.
// Phases     Prefill (the first token), decode.
// Errors     InvalidArgument  Empty logits, no finite logit, temperature negative or not finite,
//                             top_p outside (0, 1], top_k negative.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct SamplingArgs {
  VectorView logits;  // [vocab]
  float temperature = 0.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;  // 0: no limit. May exceed the vocabulary.
  uint64_t seed = 0;
  uint64_t counter = 0;  // Number of tokens drawn before: the whole sampler state with the seed.
};

absl::StatusOr<int32_t> Sample(const SamplingArgs& args, const Exec& exec);
absl::StatusOr<int32_t> SampleDefinition(const SamplingArgs& args, const Exec& exec);

// The uniform number in [0, 1) of (seed, counter): 24 bits, counter-based, the same everywhere.
float UniformAt(uint64_t seed, uint64_t counter);

// InvalidArgument naming the field and its value, as Sample would.
absl::Status ValidateSampling(float temperature, float top_p, int32_t top_k);

}  // namespace isthmus::kernels
