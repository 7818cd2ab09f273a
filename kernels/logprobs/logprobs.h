// SPDX-License-Identifier: Apache-2.0
// Log probabilities of tokens, from logits as the model gave them:
//
//   logprob[id] = logits[id] - log(sum over all ids of exp(logits[id]))
//
// and of the token that was chosen also its rank: 1 + the number of likelier ones.
//
// Shapes     logits: [vocab].
// Types      f32 logits, f32 log probabilities, i32 ids.
// Order      The likeliest first; among equals the smaller id.
// Numerics   f64: exponentials of logit - largest, summed in order of id, whose logarithm is taken
//            from that difference; each log probability is rounded to f32 once. Logits that are not
//            finite count as impossible: -infinity.
// Workspace  None.
// Phases     Prefill (the first token, and prompts), decode.
// Devices    The CPU only: few requests ask for it, and sampling rows lie on the host.
// Errors     InvalidArgument  Empty logits; chosen outside [0, vocab); num_top negative.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct LogprobsArgs {
  VectorView logits = {};  // [vocab]
  int32_t chosen = 0;
  int32_t num_top = 0;  // May exceed the vocabulary. Impossible tokens are never among them.
};

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0.0f;
  bool operator==(const TokenLogprob&) const = default;
};

// Of one place in a text.
struct TokenLogprobs {
  TokenLogprob chosen;
  int64_t rank = 0;
  std::vector<TokenLogprob> top;
  bool operator==(const TokenLogprobs&) const = default;
};

absl::StatusOr<TokenLogprobs> Logprobs(const LogprobsArgs& args, const Exec& exec);
absl::StatusOr<TokenLogprobs> LogprobsDefinition(const LogprobsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
