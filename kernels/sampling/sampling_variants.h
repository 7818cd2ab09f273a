// SPDX-License-Identifier: Apache-2.0
// The variants of sampling: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/sampling/sampling.h"

namespace isthmus::kernels {

struct SamplingVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const SamplingArgs&) = nullptr;  // Null: every valid shape.
  absl::StatusOr<int32_t> (*launch)(const SamplingArgs&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const SamplingVariant> SamplingVariants();

absl::Status ValidateSamplingArgs(const SamplingArgs& args);
absl::StatusOr<int32_t> LaunchSampleCpu(const SamplingArgs& args, const Exec& exec);

// The error of a row without a finite logit.
absl::Status NoFiniteLogit(int64_t vocabulary);

}  // namespace isthmus::kernels
