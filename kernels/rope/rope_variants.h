// SPDX-License-Identifier: Apache-2.0
// The variants of rope: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/rope/rope.h"

namespace isthmus::kernels {

// Pairs of one head that a table on the stack holds.
inline constexpr int64_t kMaxRopePairs = 64;

struct RopeVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const RopeArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const RopeArgs&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const RopeVariant> RopeVariants();

// `arch` is that of the Exec: on a device only shapes are checked, not what stands in its memory.
absl::Status ValidateRope(const RopeArgs& args, int arch = kArchCpu);
absl::Status LaunchRopeCpu(const RopeArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchRopeCuda(const RopeArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchRopeCuda)(const RopeArgs&, const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
