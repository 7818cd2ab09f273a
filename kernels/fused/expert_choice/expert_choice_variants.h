// SPDX-License-Identifier: Apache-2.0
// The variants of expert_choice: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/fused/expert_choice/expert_choice.h"

namespace isthmus::kernels {

struct ExpertChoiceVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const ExpertChoiceArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const ExpertChoiceArgs&, const Exec&) = nullptr;
};

std::span<const ExpertChoiceVariant> ExpertChoiceVariants();

// One operation after the other, each in its own variant, on any architecture.
absl::Status LaunchExpertChoiceInTurn(const ExpertChoiceArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchExpertChoiceSplitK(const ExpertChoiceArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchExpertChoiceSplitK)(const ExpertChoiceArgs&,
                                                          const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
