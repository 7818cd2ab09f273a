// SPDX-License-Identifier: Apache-2.0
#include "services/engine/scheduler.h"

#include <algorithm>

namespace isthmus::engine {
namespace {

bool IsReply(const Sequence& sequence) {
  return sequence.num_output_tokens() > 0 && sequence.num_pending() == 1;
}

// Rows that a prompt can use in one step.
int64_t MostRows(const Sequence& sequence, int64_t chunk_tokens) {
  int64_t rows = std::min(chunk_tokens, sequence.num_pending());
  const int64_t to_boundary = sequence.wanted_boundary - sequence.cache.num_tokens();
  if (to_boundary > 0) rows = std::min(rows, to_boundary);
  return rows;
}

// What prompts share: rows, and of these the ones that have logits.
struct Budget {
  int64_t rows = 0;
  int64_t logit_rows = 0;

  // All but half of `whole`, which is kept for those whose turn it is.
  Budget Without(const Budget& whole) const {
    return {rows - (whole.rows - whole.rows / 2),
            logit_rows - (whole.logit_rows - whole.logit_rows / 2)};
  }
  Budget Share(int64_t parts) const {
    parts = std::max<int64_t>(1, parts);
    return {std::max<int64_t>(1, rows / parts), std::max<int64_t>(1, logit_rows / parts)};
  }
};

}  // namespace

std::vector<StepPart> PlanStep(std::span<Sequence* const> sequences, int64_t chunk_tokens,
                               int64_t max_prompt_tokens) {
  std::vector<StepPart> parts;
  std::vector<size_t> prompts;  // Indices into parts, which has all sequences at first.
  for (Sequence* sequence : sequences) {
    const bool is_reply = IsReply(*sequence);
    if (!is_reply) prompts.push_back(parts.size());
    parts.push_back({sequence, is_reply ? 1 : 0});
  }
  const Budget whole = {max_prompt_tokens, kMaxPromptLogitRows};
  Budget left = whole;
  const auto give = [&](size_t index, const Budget& most) {
    StepPart& part = parts[index];
    const bool has_logits = part.sequence->lacks_prompt_logprobs();
    const int64_t wanted = MostRows(*part.sequence, chunk_tokens) - part.num_rows;
    int64_t given = std::min({wanted, most.rows, left.rows});
    if (has_logits) given = std::min({given, most.logit_rows, left.logit_rows});
    part.num_rows += given;
    left.rows -= given;
    if (has_logits) left.logit_rows -= given;
  };
  const auto by_urgency = [&parts](size_t a, size_t b) {
    return GoesBefore(parts[a].sequence->urgency, parts[b].sequence->urgency);
  };
  std::ranges::stable_sort(prompts, by_urgency);
  for (const size_t index : prompts) give(index, left.Without(whole));

  std::vector<size_t> by_turn = prompts;
  std::ranges::stable_sort(by_turn, [&parts](size_t a, size_t b) {
    return parts[a].sequence->last_step < parts[b].sequence->last_step;
  });
  const Budget share = left.Share(static_cast<int64_t>(prompts.size()));
  for (const size_t index : by_turn) give(index, share);
  for (const size_t index : prompts) give(index, left);
  std::erase_if(parts, [](const StepPart& part) { return part.num_rows == 0; });
  return parts;
}

}  // namespace isthmus::engine
