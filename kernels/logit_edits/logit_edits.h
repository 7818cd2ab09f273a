// SPDX-License-Identifier: Apache-2.0
// What a request changes about the logits before a token is drawn from them, in this order:
//
//   of mentioned tokens, which are those that occur in the prompt or the output:
//     logit = logit / repetition_penalty when positive, logit * repetition_penalty otherwise
//   of tokens that occur in the output:
//     logit -= frequency_penalty * occurrences there + presence_penalty
//   logit += sum of its biases
//   logit of banned tokens = -infinity
//
// Shapes     logits: [vocab]. Mentions come in ascending order of id, each id once; the other lists
//            may have any order and length.
// Types      f32 logits, i32 ids.
// Aliasing   Edits in place.
// Numerics   f64 per token, rounded to f32 once; what exceeds f32 becomes its limit, so that a
//            finite logit stays finite. Logits of other tokens keep their bits. What is not finite
//            stays as it is, but for banned tokens: a NaN is never made into a number.
// Workspace  On a CPU 16 bytes per bias. The time is that of the lists, never of the vocabulary.
// Phases     Prefill (the first token), decode.
// Devices    The CPU only: few requests ask for it, and sampling rows lie on the host.
// Errors     InvalidArgument  Empty logits; an id outside [0, vocab); mentions out of order or with
//                             a negative count; a repetition_penalty that is not finite and above
//                             0; another number that is not finite.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"

namespace isthmus::kernels {

struct LogitBias {
  int32_t id = 0;
  float bias = 0.0f;
};

// A token that occurs in the prompt or the output.
struct TokenMention {
  int32_t id = 0;
  int32_t in_output = 0;  // Occurrences there.
  bool operator==(const TokenMention&) const = default;
};

struct LogitEditsArgs {
  std::span<float> logits = {};                 // [vocab], changed
  std::span<const TokenMention> mentions = {};  // For penalties alone.
  float repetition_penalty = 1.0f;              // 1: none.
  float frequency_penalty = 0.0f;               // 0: none.
  float presence_penalty = 0.0f;
  std::span<const LogitBias> biases = {};
  std::span<const int32_t> banned_ids = {};
};

absl::Status EditLogits(const LogitEditsArgs& args, const Exec& exec);
// Bytes of scratch that EditLogits takes on the CPU.
int64_t EditLogitsScratchBytes(int64_t num_biases);
absl::Status EditLogitsDefinition(const LogitEditsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
