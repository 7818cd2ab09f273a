// SPDX-License-Identifier: Apache-2.0
// The variants of gate: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/gate/gate.h"

namespace isthmus::kernels {

// Experts per token that a choice on the stack holds.
inline constexpr int64_t kMaxGateK = 64;

struct GateVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const GateArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const GateArgs&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const GateVariant> GateVariants();

// `arch` is that of the Exec: on a device only shapes are checked, not what stands in its memory.
absl::Status ValidateGate(const GateArgs& args, int arch = kArchCpu);
absl::Status LaunchGateCpu(const GateArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchGateCuda(const GateArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchGateCuda)(const GateArgs&, const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
