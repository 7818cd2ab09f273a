// SPDX-License-Identifier: Apache-2.0
// The variants of linear; internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/linear/linear.h"

namespace isthmus::kernels {

struct LinearVariant {
  const Patch* patch;  // Null: a trusted path.
  ArchRange arches;
  bool (*supports)(const LinearArgs&);  // Null: everything that the contract allows.
  absl::Status (*launch)(const LinearArgs&, const Exec&);
};

absl::Status ValidateLinear(const LinearArgs& args);
std::span<const LinearVariant> LinearVariants();

absl::Status LaunchLinearCpu(const LinearArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
