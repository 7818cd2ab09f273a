// SPDX-License-Identifier: Apache-2.0
// The trusted path: two passes over the row, one for the largest and one for everything else; the
// few likeliest tokens are kept in order as they are met.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/core/math.h"
#include "kernels/logprobs/logprobs_variants.h"

namespace isthmus::kernels {
namespace {

constexpr float kImpossible = -std::numeric_limits<float>::infinity();

// Holds `limit` entries at most, the likeliest first. Ids come in ascending order, so an equal one
// goes behind. The logits stand where the log probabilities will be.
void Keep(std::vector<TokenLogprob>& top, size_t limit, TokenLogprob entry) {
  if (top.size() == limit && (limit == 0 || entry.logprob <= top.back().logprob)) return;
  const auto place =
      std::ranges::upper_bound(top, entry.logprob, std::greater<>(), &TokenLogprob::logprob);
  top.insert(place, entry);
  if (top.size() > limit) top.pop_back();
}

}  // namespace

absl::StatusOr<TokenLogprobs> LaunchLogprobsCpu(const LogprobsArgs& args, const Exec&) {
  const float* logits = args.logits.f32();
  float largest = kImpossible;
  for (int64_t id = 0; id < args.logits.size; ++id) {
    if (std::isfinite(logits[id])) largest = std::max(largest, logits[id]);
  }
  TokenLogprobs result;
  const float chosen = std::isfinite(logits[args.chosen]) ? logits[args.chosen] : kImpossible;
  const auto limit = static_cast<size_t>(args.num_top);
  double sum = 0.0;
  result.rank = 1;
  for (int64_t id = 0; id < args.logits.size; ++id) {
    const float logit = logits[id];
    if (!std::isfinite(logit)) continue;
    sum += ExpF64(double{logit} - double{largest});
    if (logit > chosen) ++result.rank;
    Keep(result.top, limit, {static_cast<int32_t>(id), logit});
  }
  const double log_sum = LogF64(sum);
  const auto logprob = [&](float logit) {
    return static_cast<float>((double{logit} - double{largest}) - log_sum);
  };
  result.chosen = {args.chosen, chosen == kImpossible ? chosen : logprob(chosen)};
  for (TokenLogprob& entry : result.top) entry.logprob = logprob(entry.logprob);
  return result;
}

}  // namespace isthmus::kernels
