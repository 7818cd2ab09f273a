// SPDX-License-Identifier: Apache-2.0
// Who takes part in a step, and with how many tokens: every reply with one, prompts within a budget
// that they share.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "services/engine/sequence.h"

namespace isthmus::engine {

struct StepPart {
  Sequence* sequence = nullptr;
  int64_t num_rows = 0;  // Of its pending tokens, the next ones. At least 1.
};

// The parts of the next step, in the order of `sequences`, none of which is finished. A prompt gets
// at most `chunk_tokens`; all prompts together get at most `max_prompt_tokens`. Each gets an equal
// share and the older ones what is left; when there are more prompts than tokens, those whose last
// step is longest ago go first, so that none waits for ever.
std::vector<StepPart> PlanStep(std::span<Sequence* const> sequences, int64_t chunk_tokens,
                               int64_t max_prompt_tokens);

}  // namespace isthmus::engine
