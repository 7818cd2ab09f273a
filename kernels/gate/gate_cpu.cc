// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of gate: scores, then one insertion pass over the experts, which keeps the
// best k so far. Almost every expert fails the first comparison. Plain C++, compiled once.
//
// Letters: t token, e expert, i rank.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/core/math.h"
#include "kernels/gate/gate_variants.h"

namespace isthmus::kernels {
namespace {

// Scores that are worth handing to another thread.
constexpr int64_t kGrainScores = 1024;

// ids[k] <- the k largest of a + bias, larger first, then smaller id; NaN after everything else.
void ChooseLargest(const float* a, const float* bias, int64_t experts, int64_t k, int32_t* ids) {
  float best[kMaxGateK];
  int64_t kept = 0;
  const auto insert = [&](float value, int64_t e) {
    int64_t i = kept < k ? kept++ : k - 1;
    for (; i > 0 && best[i - 1] < value; --i) {  // Strict: an equal smaller id stays ahead.
      best[i] = best[i - 1];
      ids[i] = ids[i - 1];
    }
    best[i] = value;
    ids[i] = static_cast<int32_t>(e);
  };
  for (int64_t e = 0; e < experts; ++e) {
    const float value = a[e] + bias[e];
    if (std::isnan(value)) continue;
    if (kept < k || value > best[k - 1]) insert(value, e);
  }
  for (int64_t e = 0; e < experts && kept < k; ++e) {
    if (std::isnan(a[e] + bias[e])) ids[kept++] = static_cast<int32_t>(e);
  }
}

void Weigh(const float* a, const int32_t* ids, int64_t k, float route_scale, float* weights) {
  float sum = 0.0f;
  for (int64_t i = 0; i < k; ++i) sum += a[ids[i]];
  if (sum == 0.0f) sum = 1e-20f;
  for (int64_t i = 0; i < k; ++i) weights[i] = a[ids[i]] / sum * route_scale;
}

}  // namespace

absl::Status LaunchGateCpu(const GateArgs& args, const Exec& exec) {
  const int64_t experts = args.logits.cols;
  const int64_t k = args.k;
  const int64_t grain = std::max<int64_t>(1, kGrainScores / experts);
  ParallelFor(exec, args.logits.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* a = args.scores.f32(t);
      const float* logits = args.logits.f32(t);
      for (int64_t e = 0; e < experts; ++e) a[e] = SqrtSoftplus(logits[e]);
      int32_t* ids = args.ids + t * k;
      if (args.hash_ids.empty()) {
        ChooseLargest(a, args.bias.f32(), experts, k, ids);
      } else {
        const int64_t* row = args.hash_ids.data() + args.token_ids[t] * k;
        for (int64_t i = 0; i < k; ++i) ids[i] = static_cast<int32_t>(row[i]);
      }
      Weigh(a, ids, k, args.route_scale, args.weights + t * k);
    }
  });
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
