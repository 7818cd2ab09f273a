// SPDX-License-Identifier: Apache-2.0
#include "services/engine/preemption.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/engine/prefix_reuse.h"

namespace isthmus::engine {
namespace {

// Tokens that have to fit after the part: its rows, and behind the last one what may be drafted.
int64_t TokensAfter(Engine& engine, const StepPart& part) {
  const Sequence& sequence = *part.sequence;
  const int64_t rows = sequence.cache.num_tokens() + part.num_rows;
  if (part.num_rows < sequence.num_pending() || sequence.num_output_tokens() == 0) return rows;
  const int64_t room =
      std::min(sequence.sampling.max_tokens - sequence.num_output_tokens(),
               engine.forward().max_positions() - static_cast<int64_t>(sequence.tokens.size()));
  return rows + std::clamp<int64_t>(room - 1, 0, engine.forward().max_accepted());
}

}  // namespace

absl::Status ReserveStep(Engine& engine, std::span<Sequence* const> sequences) {
  std::vector<StepPart> parts =
      PlanStep(sequences, engine.options().chunk_tokens, engine.options().max_batch_tokens);
  std::ranges::stable_sort(parts, [](const StepPart& a, const StepPart& b) {
    return GoesBefore(a.sequence->urgency, b.sequence->urgency);
  });
  for (const StepPart& part : parts) {
    Sequence& sequence = *part.sequence;
    ISTHMUS_RETURN_IF_ERROR(sequence.cache.Reserve(TokensAfter(engine, part)));
    sequence.claim.SetTokens(sequence.cache.capacity_tokens(), sequence.num_output_tokens());
  }
  return absl::OkStatus();
}

absl::Status CheckFitsAlone(Engine& engine, const Sequence& sequence) {
  const auto num_tokens = static_cast<int64_t>(sequence.tokens.size());
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    const int64_t wanted = engine.pool().layout().PagesFor(kind, num_tokens);
    const int64_t all = engine.pool().pages(kind).num_pages();
    if (wanted <= all) continue;
    return absl::ResourceExhaustedError(
        absl::StrCat("page pool ", engine.pool().layout().kinds[k].name, ": ", num_tokens,
                     " tokens want ", wanted, " pages, the whole pool has ", all));
  }
  return absl::OkStatus();
}

void Preempt(Sequence& sequence) {
  sequence.num_once_cached = std::max(sequence.num_once_cached, sequence.cache.num_tokens());
  sequence.cache = kv::SequenceCache();
  sequence.counts = {};  // The memory plan has room for those that run.
  sequence.claim.SetPreempted();
}

absl::Status Resume(Engine& engine, Sequence& sequence) {
  ISTHMUS_RETURN_IF_ERROR(sequence.claim.CheckResume());
  ISTHMUS_RETURN_IF_ERROR(
      OpenWithPrefix(engine.pool(), static_cast<int64_t>(sequence.tokens.size()) + 1, sequence));
  sequence.claim.SetTokens(sequence.cache.capacity_tokens(), sequence.num_output_tokens());
  return absl::OkStatus();
}

}  // namespace isthmus::engine
