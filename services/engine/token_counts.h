// SPDX-License-Identifier: Apache-2.0
// Which tokens a sequence has mentioned and how often, kept beside it for penalties: a token then
// costs a look at what it adds and at the distinct tokens so far, never one at a prompt of any
// length. It follows from the sequence's tokens, so it neither travels nor is saved: who continues
// a sequence counts anew when a penalty first asks.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits.h"

namespace isthmus::engine {

struct TokenCounts {
  std::vector<kernels::TokenMention> mentions = {};  // In ascending order of id.
  int64_t num_counted = 0;                           // Of the sequence's tokens.
};

// Brings `counts` up to `tokens`, of which the first `num_prompt_tokens` are the prompt and to
// which tokens were only ever appended since the last call. InvalidArgument: a token outside [0,
// vocab).
absl::Status CountTokens(std::span<const int32_t> tokens, int64_t num_prompt_tokens, int64_t vocab,
                         kernels::Workspace* workspace, TokenCounts& counts);

// Bytes of scratch that CountTokens takes, at most.
int64_t CountScratchBytes(int64_t vocab);
// Bytes that the counts of one sequence hold, at most.
int64_t TokenCountsBytes(int64_t vocab);

}  // namespace isthmus::engine
