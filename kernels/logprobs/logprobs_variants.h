// SPDX-License-Identifier: Apache-2.0
// The variants of log probabilities: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/logprobs/logprobs.h"

namespace isthmus::kernels {

struct LogprobsVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const LogprobsArgs&) = nullptr;  // Null: every valid shape.
  absl::StatusOr<TokenLogprobs> (*launch)(const LogprobsArgs&, const Exec&) = nullptr;
};

std::span<const LogprobsVariant> LogprobsVariants();

absl::Status ValidateLogprobs(const LogprobsArgs& args);

absl::StatusOr<TokenLogprobs> LaunchLogprobsCpu(const LogprobsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
