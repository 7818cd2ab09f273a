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

// With `is_device` what lies in device memory is not looked at.
absl::Status ValidateExperts(const ExpertsArgs& args, bool is_device = false);
std::span<const ExpertsVariant> ExpertsVariants();

absl::Status LaunchExpertsCpu(const ExpertsArgs& args, const Exec& exec);
// Null in a build without CUDA, so that their rows of the table are never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchExpertsCuda(const ExpertsArgs& args, const Exec& exec);
bool SupportsGroupedOnSm90(const ExpertsArgs& args);
bool SupportsGroupedOnSm120(const ExpertsArgs& args);
absl::Status LaunchExpertsGroupedW4A8(const ExpertsArgs& args, const Exec& exec);
absl::Status LaunchExpertsGroupedW4A8Sm120(const ExpertsArgs& args, const Exec& exec);
absl::Status LaunchExpertsGroupedMxf8f6f4(const ExpertsArgs& args, const Exec& exec);
bool SupportsGroupedW4A4(const ExpertsArgs& args);
absl::Status LaunchExpertsGroupedW4A4(const ExpertsArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchExpertsCuda)(const ExpertsArgs&, const Exec&) = nullptr;
inline constexpr bool (*SupportsGroupedOnSm90)(const ExpertsArgs&) = nullptr;
inline constexpr bool (*SupportsGroupedOnSm120)(const ExpertsArgs&) = nullptr;
inline constexpr absl::Status (*LaunchExpertsGroupedW4A8)(const ExpertsArgs&,
                                                          const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchExpertsGroupedW4A8Sm120)(const ExpertsArgs&,
                                                               const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchExpertsGroupedMxf8f6f4)(const ExpertsArgs&,
                                                              const Exec&) = nullptr;
inline constexpr bool (*SupportsGroupedW4A4)(const ExpertsArgs&) = nullptr;
inline constexpr absl::Status (*LaunchExpertsGroupedW4A4)(const ExpertsArgs&,
                                                          const Exec&) = nullptr;
#endif

// The definition with the rows of routed experts of fp4 rounded to NVFP4 where the arithmetic
// rounds them to e4m3: what experts.grouped_w4a4 computes.
absl::Status ExpertsDefinitionW4A4(const ExpertsArgs& args, const Exec& exec);

// True when `arithmetic` quantises the input of `w` (specification 2.7).
inline bool QuantisesInput(const WeightView& w, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kReference && QuantisesInput(w.format);
}

}  // namespace isthmus::kernels
