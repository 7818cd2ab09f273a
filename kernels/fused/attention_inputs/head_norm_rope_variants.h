// SPDX-License-Identifier: Apache-2.0
// The variants of head_norm_rope: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/fused/attention_inputs/head_norm_rope.h"

namespace isthmus::kernels {

struct HeadNormRopeVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const HeadNormRopeArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const HeadNormRopeArgs&, const Exec&) = nullptr;
};

absl::Status ValidateHeadNormRope(const HeadNormRopeArgs& args);
std::span<const HeadNormRopeVariant> HeadNormRopeVariants();
extern const Patch kHeadNormRopeWarpPerHead;

// One operation after another, on any architecture.
absl::Status LaunchHeadNormRopeInTurn(const HeadNormRopeArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchHeadNormRopeWarps(const HeadNormRopeArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchHeadNormRopeWarps)(const HeadNormRopeArgs&,
                                                         const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
