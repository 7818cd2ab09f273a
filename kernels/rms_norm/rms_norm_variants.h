// SPDX-License-Identifier: Apache-2.0
// The variants of rms_norm: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/rms_norm/rms_norm.h"

namespace isthmus::kernels {

struct RmsNormVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const RmsNormArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const RmsNormArgs&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const RmsNormVariant> RmsNormVariants();

absl::Status ValidateRmsNorm(const RmsNormArgs& args);
absl::Status LaunchRmsNormCpu(const RmsNormArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchRmsNormCuda(const RmsNormArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchRmsNormCuda)(const RmsNormArgs&, const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
