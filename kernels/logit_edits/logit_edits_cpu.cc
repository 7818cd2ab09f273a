// SPDX-License-Identifier: Apache-2.0
// The trusted path: occurrences are counted once, then each token is edited that has any or a bias.
// The time is that of a pass over prompt and output and of two over the vocabulary.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits_variants.h"

namespace isthmus::kernels {
namespace {

constexpr double kLimit = std::numeric_limits<float>::max();

// What is known of every token.
struct Mention {
  double bias = 0.0;
  int32_t in_output = 0;
  bool is_known = false;  // Occurs in the prompt or the output.
};

double Penalised(const LogitEditsArgs& args, const Mention& mention, double logit) {
  if (!mention.is_known) return logit;
  logit = logit > 0.0 ? logit / args.repetition_penalty : logit * args.repetition_penalty;
  if (mention.in_output == 0) return logit;
  return logit -
         (double{args.frequency_penalty} * mention.in_output + double{args.presence_penalty});
}

}  // namespace

int64_t EditLogitsScratchBytes(int64_t vocab) {
  return Workspace::RoundedBytes(vocab * static_cast<int64_t>(sizeof(Mention)));
}

absl::Status LaunchEditLogitsCpu(const LogitEditsArgs& args, const Exec& exec) {
  float* logits = args.logits.data();
  const auto vocab = static_cast<int64_t>(args.logits.size());
  const bool has_penalty = args.repetition_penalty != 1.0f || args.frequency_penalty != 0.0f ||
                           args.presence_penalty != 0.0f;
  if (has_penalty || !args.biases.empty()) {
    Workspace::Scope scope(exec.workspace);
    auto* mentions = scope.Take<Mention>(vocab);
    std::fill_n(mentions, vocab, Mention());
    if (has_penalty) {
      for (const int32_t id : args.prompt_ids) mentions[id].is_known = true;
      for (const int32_t id : args.output_ids) {
        mentions[id].is_known = true;
        ++mentions[id].in_output;
      }
    }
    for (const LogitBias& bias : args.biases) mentions[bias.id].bias += bias.bias;
    for (int64_t id = 0; id < vocab; ++id) {
      const Mention& mention = mentions[id];
      if (!std::isfinite(logits[id]) || (!mention.is_known && mention.bias == 0.0)) continue;
      const double logit = Penalised(args, mention, logits[id]) + mention.bias;
      logits[id] = static_cast<float>(std::clamp(logit, -kLimit, kLimit));
    }
  }
  for (const int32_t id : args.banned_ids) logits[id] = -std::numeric_limits<float>::infinity();
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
