// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against sampling.h, never to be fast: sort, sum, cut, draw.
// The masses are the f32 exponentials of kernels/core/math.h, as the contract says, so that tokens
// can be compared exactly.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/core/math.h"
#include "kernels/sampling/sampling.h"
#include "kernels/sampling/sampling_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::StatusOr<int32_t> SampleDefinition(const SamplingArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSamplingArgs(args));
  const float* logits = args.logits.f32();
  std::vector<int32_t> order;
  for (int64_t id = 0; id < args.logits.size; ++id) {
    if (std::isfinite(logits[id])) order.push_back(static_cast<int32_t>(id));
  }
  if (order.empty()) return NoFiniteLogit(args.logits.size);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t left, int32_t right) { return logits[left] > logits[right]; });
  if (args.temperature == 0.0f) return order[0];

  std::vector<float> mass;  // Of softmax(logits / temperature), times a constant.
  mass.reserve(order.size());
  for (const int32_t id : order) {
    mass.push_back(Exp((logits[id] - logits[order[0]]) / args.temperature));
  }
  if (args.top_k > 0 && static_cast<size_t>(args.top_k) < mass.size()) mass.resize(args.top_k);
  double total = 0.0;
  for (const float m : mass) total += m;

  double kept = 0.0;
  size_t prefix = 0;
  while (prefix < mass.size()) {
    kept += mass[prefix++];
    if (kept >= double{args.top_p} * total) break;
  }
  // The likeliest has mass 1.
  size_t likely = 0;
  double kept_of_likely = 0.0;
  while (likely < prefix && mass[likely] >= args.min_p) kept_of_likely += mass[likely++];
  prefix = likely;
  kept = kept_of_likely;

  const double target = double{UniformAt(args.seed, args.counter)} * kept;
  double reached = 0.0;
  for (size_t rank = 0; rank < prefix; ++rank) {
    reached += mass[rank];
    if (reached > target) return order[rank];
  }
  return order[0];  // Not reached: `reached` ends at `kept`, which is above the target.
}

}  // namespace isthmus::kernels
