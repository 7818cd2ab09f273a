// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against logit_edits.h, never to be fast.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/logit_edits/logit_edits.h"
#include "kernels/logit_edits/logit_edits_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::Status EditLogitsDefinition(const LogitEditsArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateLogitEdits(args));
  float* logits = args.logits.data();
  for (int64_t i = 0; i < static_cast<int64_t>(args.logits.size()); ++i) {
    const auto id = static_cast<int32_t>(i);
    const auto mention = std::ranges::find(args.mentions, id, &TokenMention::id);
    const bool is_mentioned = mention != args.mentions.end();
    const int32_t in_output = is_mentioned ? mention->in_output : 0;
    double biases = 0.0;
    for (const LogitBias& bias : args.biases) biases += bias.id == id ? double{bias.bias} : 0.0;
    if ((is_mentioned || biases != 0.0) && std::isfinite(logits[i])) {
      double logit = logits[i];
      if (is_mentioned) {
        logit = logit > 0.0 ? logit / args.repetition_penalty : logit * args.repetition_penalty;
      }
      if (in_output > 0) {
        logit -= double{args.frequency_penalty} * in_output + double{args.presence_penalty};
      }
      logit += biases;
      constexpr double kLimit = std::numeric_limits<float>::max();
      logits[i] = static_cast<float>(std::clamp(logit, -kLimit, kLimit));
    }
    if (std::ranges::count(args.banned_ids, id) > 0) {
      logits[i] = -std::numeric_limits<float>::infinity();
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
