// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of logit edits.
#include "kernels/logit_edits/logit_edits.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/logit_edits/logit_edits_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr LogitEditsVariant kVariants[] = {
    {nullptr, kCpuOnly, nullptr, LaunchEditLogitsCpu},
};

absl::Status CheckId(absl::string_view list, size_t index, int32_t id, int64_t vocab) {
  if (id >= 0 && id < vocab) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("logit_edits: ", list, "[", index, "] is ", id, "; the vocabulary has ", vocab));
}

absl::Status CheckMentions(std::span<const TokenMention> mentions, int64_t vocab) {
  int64_t previous = -1;
  for (size_t i = 0; i < mentions.size(); ++i) {
    const auto [id, in_output] = mentions[i];
    if (id > previous && id < vocab && in_output >= 0) {
      previous = id;
      continue;
    }
    ISTHMUS_RETURN_IF_ERROR(CheckId("mentions", i, id, vocab));
    if (in_output < 0) {
      return absl::InvalidArgumentError(absl::StrCat("logit_edits: mentions[", i, "] occurs ",
                                                     in_output, " times; want at least 0"));
    }
    return absl::InvalidArgumentError(absl::StrCat("logit_edits: mentions[", i, "] is ", id,
                                                   " behind ", previous, "; ids must ascend"));
  }
  return absl::OkStatus();
}

}  // namespace

std::span<const LogitEditsVariant> LogitEditsVariants() { return kVariants; }

absl::Status ValidateLogitEdits(const LogitEditsArgs& args) {
  if (args.logits.empty()) {
    return absl::InvalidArgumentError("logit_edits: there are 0 logits; there must be at least 1");
  }
  if (!std::isfinite(args.repetition_penalty) || args.repetition_penalty <= 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat("logit_edits: repetition_penalty is ",
                                                   args.repetition_penalty,
                                                   "; it must be finite and above 0"));
  }
  if (!std::isfinite(args.frequency_penalty) || !std::isfinite(args.presence_penalty)) {
    return absl::InvalidArgumentError(absl::StrCat("logit_edits: frequency_penalty is ",
                                                   args.frequency_penalty, ", presence_penalty is ",
                                                   args.presence_penalty, "; both must be finite"));
  }
  const auto vocab = static_cast<int64_t>(args.logits.size());
  ISTHMUS_RETURN_IF_ERROR(CheckMentions(args.mentions, vocab));
  for (size_t i = 0; i < args.banned_ids.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(CheckId("banned_ids", i, args.banned_ids[i], vocab));
  }
  for (size_t i = 0; i < args.biases.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(CheckId("biases", i, args.biases[i].id, vocab));
    if (std::isfinite(args.biases[i].bias)) continue;
    return absl::InvalidArgumentError(absl::StrCat("logit_edits: biases[", i, "] is ",
                                                   args.biases[i].bias, "; it must be finite"));
  }
  return absl::OkStatus();
}

absl::Status EditLogits(const LogitEditsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateLogitEdits(args));
  ISTHMUS_ASSIGN_OR_RETURN(const LogitEditsVariant* variant,
                           Choose(LogitEditsVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
