// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against logprobs.h, never to be fast.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/core/math.h"
#include "kernels/logprobs/logprobs_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::StatusOr<TokenLogprobs> LogprobsDefinition(const LogprobsArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateLogprobs(args));
  const float* logits = args.logits.f32();
  std::vector<int32_t> order;
  for (int64_t id = 0; id < args.logits.size; ++id) {
    if (std::isfinite(logits[id])) order.push_back(static_cast<int32_t>(id));
  }
  double sum = 0.0;
  double largest = 0.0;
  if (!order.empty()) {
    largest = logits[*std::ranges::max_element(order, {}, [&](int32_t id) { return logits[id]; })];
  }
  for (const int32_t id : order) sum += ExpF64(logits[id] - largest);
  // The largest is taken off first: of two huge logits the difference is exact.
  const auto logprob = [&](int32_t id) {
    return static_cast<float>((logits[id] - largest) - LogF64(sum));
  };
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });

  TokenLogprobs result;
  const bool is_possible = std::isfinite(logits[args.chosen]);
  result.chosen = {args.chosen,
                   is_possible ? logprob(args.chosen) : -std::numeric_limits<float>::infinity()};
  result.rank = 1;
  for (const int32_t id : order) {
    if (!is_possible || logits[id] > logits[args.chosen]) ++result.rank;
  }
  for (const int32_t id : order) {
    if (static_cast<int64_t>(result.top.size()) == args.num_top) break;
    result.top.push_back({id, logprob(id)});
  }
  return result;
}

}  // namespace isthmus::kernels
