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

absl::Status ValidateGate(const GateArgs& args);
absl::Status LaunchGateCpu(const GateArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
