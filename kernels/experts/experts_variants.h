// SPDX-License-Identifier: Apache-2.0
// The variants of experts; internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/experts/experts.h"

namespace isthmus::kernels {

struct ExpertsVariant {
  const Patch* patch;  // Null: a trusted path.
  ArchRange arches;
  bool (*supports)(const ExpertsArgs&);  // Null: everything that the contract allows.
  absl::Status (*launch)(const ExpertsArgs&, const Exec&);
};

absl::Status ValidateExperts(const ExpertsArgs& args);
std::span<const ExpertsVariant> ExpertsVariants();

absl::Status LaunchExpertsCpu(const ExpertsArgs& args, const Exec& exec);

// True when `arithmetic` quantises the input of `w` (specification 2.7).
inline bool QuantisesInput(const WeightView& w, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kReference && QuantisesInput(w.format);
}

}  // namespace isthmus::kernels
