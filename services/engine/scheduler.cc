// SPDX-License-Identifier: Apache-2.0
#include "services/engine/scheduler.h"

#include <algorithm>

namespace isthmus::engine {

std::vector<StepPart> PlanStep(std::span<Sequence* const> sequences, int64_t chunk_tokens,
                               int64_t max_prompt_tokens) {
  std::vector<StepPart> parts;
  std::vector<size_t> prompts;  // Indices into parts, which has all sequences at first.
  for (Sequence* sequence : sequences) {
    const bool is_reply = sequence->num_output_tokens() > 0 && sequence->num_pending() == 1;
    if (!is_reply) prompts.push_back(parts.size());
    parts.push_back({sequence, is_reply ? 1 : 0});
  }
  std::ranges::stable_sort(prompts, [&parts](size_t a, size_t b) {
    return parts[a].sequence->last_step < parts[b].sequence->last_step;
  });
  int64_t budget = max_prompt_tokens;
  const auto give = [&](size_t index, int64_t most) {
    StepPart& part = parts[index];
    const int64_t wanted = std::min(chunk_tokens, part.sequence->num_pending()) - part.num_rows;
    const int64_t given = std::min({wanted, most, budget});
    part.num_rows += given;
    budget -= given;
  };
  if (!prompts.empty()) {
    const int64_t share =
        std::max<int64_t>(1, max_prompt_tokens / static_cast<int64_t>(prompts.size()));
    for (const size_t index : prompts) give(index, share);
  }
  std::ranges::sort(prompts);  // By age again.
  for (const size_t index : prompts) give(index, budget);
  std::erase_if(parts, [](const StepPart& part) { return part.num_rows == 0; });
  return parts;
}

}  // namespace isthmus::engine
