// SPDX-License-Identifier: Apache-2.0
// The variants of attention_inputs: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/fused/attention_inputs/attention_inputs.h"

namespace isthmus::kernels {

struct AttentionInputsVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const AttentionInputsArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const AttentionInputsArgs&, const Exec&) = nullptr;
};

std::span<const AttentionInputsVariant> AttentionInputsVariants();

// One operation after another, each in its own variant, on any architecture.
absl::Status LaunchAttentionInputsInTurn(const AttentionInputsArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchAttentionInputsParts(const AttentionInputsArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchAttentionInputsParts)(const AttentionInputsArgs&,
                                                            const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
