// SPDX-License-Identifier: Apache-2.0
// The trusted path: biases are put into the order of the mentions, then one pass over both lists
// meets each token once that has a mention or a bias.
#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits_variants.h"

namespace isthmus::kernels {
namespace {

constexpr double kLimit = std::numeric_limits<float>::max();

// Where the bias of a token stands among the arguments.
struct BiasPlace {
  int32_t id = 0;
  int32_t index = 0;
};

double Penalised(const LogitEditsArgs& args, int32_t in_output, double logit) {
  logit = logit > 0.0 ? logit / args.repetition_penalty : logit * args.repetition_penalty;
  if (in_output == 0) return logit;
  return logit - (double{args.frequency_penalty} * in_output + double{args.presence_penalty});
}

}  // namespace

int64_t EditLogitsScratchBytes(int64_t num_biases) {
  return Workspace::RoundedBytes(num_biases * static_cast<int64_t>(sizeof(BiasPlace)));
}

absl::Status LaunchEditLogitsCpu(const LogitEditsArgs& args, const Exec& exec) {
  float* logits = args.logits.data();
  Workspace::Scope scope(exec.workspace);
  const auto num_biases = static_cast<int64_t>(args.biases.size());
  auto* places = scope.Take<BiasPlace>(num_biases);
  for (int64_t i = 0; i < num_biases; ++i) {
    places[i] = {args.biases[static_cast<size_t>(i)].id, static_cast<int32_t>(i)};
  }
  // Biases of one token are summed in the order of the arguments.
  std::sort(places, places + num_biases, [](const BiasPlace& a, const BiasPlace& b) {
    return std::tie(a.id, a.index) < std::tie(b.id, b.index);
  });

  const bool has_penalty = args.repetition_penalty != 1.0f || args.frequency_penalty != 0.0f ||
                           args.presence_penalty != 0.0f;
  auto mention = args.mentions.begin();
  const auto end = has_penalty ? args.mentions.end() : args.mentions.begin();
  int64_t next = 0;
  while (mention != end || next < num_biases) {
    const bool is_known = mention != end && (next == num_biases || mention->id <= places[next].id);
    const int32_t id = is_known ? mention->id : places[next].id;
    double bias = 0.0;
    for (; next < num_biases && places[next].id == id; ++next) {
      bias += args.biases[static_cast<size_t>(places[next].index)].bias;
    }
    const int32_t in_output = is_known ? (mention++)->in_output : 0;
    if (!std::isfinite(logits[id]) || (!is_known && bias == 0.0)) continue;
    double logit = logits[id];
    if (is_known) logit = Penalised(args, in_output, logit);
    logits[id] = static_cast<float>(std::clamp(logit + bias, -kLimit, kLimit));
  }
  for (const int32_t id : args.banned_ids) logits[id] = -std::numeric_limits<float>::infinity();
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
