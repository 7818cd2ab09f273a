// SPDX-License-Identifier: Apache-2.0
// Validation and the variant table of log probabilities.
#include "kernels/logprobs/logprobs.h"

#include "absl/strings/str_cat.h"
#include "kernels/logprobs/logprobs_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr LogprobsVariant kVariants[] = {
    {nullptr, kCpuOnly, nullptr, LaunchLogprobsCpu},
};

}  // namespace

std::span<const LogprobsVariant> LogprobsVariants() { return kVariants; }

absl::Status ValidateLogprobs(const LogprobsArgs& args) {
  if (args.logits.dtype != DType::kF32 || args.logits.size < 1 || args.logits.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("logprobs: there are ", args.logits.size, " logits of dtype ",
                     static_cast<int>(args.logits.dtype), "; there must be at least 1, f32"));
  }
  if (args.chosen < 0 || args.chosen >= args.logits.size) {
    return absl::InvalidArgumentError(absl::StrCat("logprobs: chosen is ", args.chosen,
                                                   "; the vocabulary has ", args.logits.size));
  }
  if (args.num_top < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("logprobs: num_top is ", args.num_top, "; it must be at least 0"));
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenLogprobs> Logprobs(const LogprobsArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateLogprobs(args));
  ISTHMUS_ASSIGN_OR_RETURN(const LogprobsVariant* variant, Choose(LogprobsVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
