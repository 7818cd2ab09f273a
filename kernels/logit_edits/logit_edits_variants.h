// SPDX-License-Identifier: Apache-2.0
// The variants of logit edits: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/logit_edits/logit_edits.h"

namespace isthmus::kernels {

struct LogitEditsVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const LogitEditsArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const LogitEditsArgs&, const Exec&) = nullptr;
};

std::span<const LogitEditsVariant> LogitEditsVariants();

absl::Status ValidateLogitEdits(const LogitEditsArgs& args);

absl::Status LaunchEditLogitsCpu(const LogitEditsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
