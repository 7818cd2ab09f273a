// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against the formula in gate.h, never to be fast. Scores are
// f64 rounded to f32 and the choice is made among the f32 sums a + bias, as the contract says, so
// ids can be compared exactly. log1p and exp are libm's, so that the definition shares nothing with
// what it is held against.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/gate/gate.h"
#include "kernels/gate/gate_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

double Softplus(double z) { return std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z))); }

}  // namespace

absl::Status GateDefinition(const GateArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateGate(args));
  const int64_t experts = args.logits.cols;
  for (int64_t t = 0; t < args.logits.rows; ++t) {
    float* a = args.scores.f32(t);
    for (int64_t e = 0; e < experts; ++e) {
      const double z = args.logits.f32(t)[e];
      a[e] = std::isnan(z) ? static_cast<float>(z) : static_cast<float>(std::sqrt(Softplus(z)));
    }

    std::vector<int64_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    if (args.hash_ids.empty()) {
      const float* bias = args.bias.f32();
      std::stable_sort(order.begin(), order.end(), [&](int64_t left, int64_t right) {
        const float b = a[right] + bias[right];
        const float c = a[left] + bias[left];
        return c > b || (std::isnan(b) && !std::isnan(c));
      });
    } else {
      for (int64_t i = 0; i < args.k; ++i) {
        order[i] = args.hash_ids[args.token_ids[t] * args.k + i];
      }
    }

    double sum = 0.0;
    for (int64_t i = 0; i < args.k; ++i) sum += a[order[i]];
    if (sum == 0.0) sum = 1e-20;
    for (int64_t i = 0; i < args.k; ++i) {
      args.ids[t * args.k + i] = static_cast<int32_t>(order[i]);
      args.weights[t * args.k + i] = static_cast<float>(a[order[i]] / sum * args.route_scale);
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
