// SPDX-License-Identifier: Apache-2.0
// Who takes part in a step, and with how many tokens: every reply with one, prompts within a budget
// that they share by urgency.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/sequence.h"

namespace isthmus::engine {

// Rows with logits of their own, as many as the vocabulary has tokens, that prompts whose log
// probabilities are wanted get in one step together.
inline constexpr int64_t kMaxPromptLogitRows = 64;

struct StepPart {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;  // Of its pending tokens, the next ones. At least 1.
};

// The parts of the next step, in the order of `sequences`, none of which is finished. A function of
// its arguments alone.
//
// Every reply has its turn in every step, whatever waits beside it. A prompt, or a reply that has
// to be recomputed, gets at most `chunk_tokens` and never goes past its wanted boundary; all of
// them together get at most `max_prompt_tokens`. Half of that goes to the most urgent one, as far
// as it can use it, then to the next. Of the other half each gets an equal share, so that a short
// prompt need not wait for the end of a long one; where there are more prompts than tokens, those
// whose last step is longest ago go first, so that none waits for ever. What is left over goes by
// urgency again. kMaxPromptLogitRows are shared in the same way.
std::vector<StepPart> PlanStep(std::span<Sequence* const> sequences, int64_t chunk_tokens,
                               int64_t max_prompt_tokens);

}  // namespace isthmus::engine
