// SPDX-License-Identifier: Apache-2.0
#include "services/engine/scheduler.h"

#include <algorithm>

namespace isthmus::engine {
namespace {

// Of a prompt whose log probabilities are wanted, in one step.
constexpr int64_t kMostLogprobRows = 64;

bool IsReply(const Sequence& sequence) {
  return sequence.num_output_tokens() > 0 && sequence.num_pending() == 1;
}

// Rows that a prompt can use in one step.
int64_t MostRows(const Sequence& sequence, int64_t chunk_tokens) {
  int64_t rows = std::min(chunk_tokens, sequence.num_pending());
  const int64_t to_boundary = sequence.wanted_boundary - sequence.cache.num_tokens();
  if (to_boundary > 0) rows = std::min(rows, to_boundary);
  // Each of these rows has logits of its own, as many as the vocabulary has tokens.
  if (sequence.lacks_prompt_logprobs()) rows = std::min(rows, kMostLogprobRows);
  return rows;
}

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
  int64_t budget = max_prompt_tokens;
  const auto give = [&](size_t index, int64_t most) {
    StepPart& part = parts[index];
    const int64_t wanted = MostRows(*part.sequence, chunk_tokens) - part.num_rows;
    const int64_t given = std::min({wanted, most, budget});
    part.num_rows += given;
    budget -= given;
  };
  const auto by_urgency = [&parts](size_t a, size_t b) {
    return GoesBefore(parts[a].sequence->urgency, parts[b].sequence->urgency);
  };
  std::ranges::stable_sort(prompts, by_urgency);
  const int64_t shared = max_prompt_tokens - max_prompt_tokens / 2;
  for (const size_t index : prompts) give(index, budget - shared);

  std::vector<size_t> by_turn = prompts;
  std::ranges::stable_sort(by_turn, [&parts](size_t a, size_t b) {
    return parts[a].sequence->last_step < parts[b].sequence->last_step;
  });
  const auto num_prompts = static_cast<int64_t>(prompts.size());
  const int64_t share = std::max<int64_t>(1, budget / std::max<int64_t>(1, num_prompts));
  for (const size_t index : by_turn) give(index, share);
  for (const size_t index : prompts) give(index, budget);
  std::erase_if(parts, [](const StepPart& part) { return part.num_rows == 0; });
  return parts;
}

}  // namespace isthmus::engine
