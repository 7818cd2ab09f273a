// SPDX-License-Identifier: Apache-2.0
// The variant record of attention and its launchers. Internal to this folder and its tests.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/attention/attention.h"
#include "kernels/core/exec.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

struct AttentionVariant {
  const Patch* patch = nullptr;  // Null: the trusted path.
  ArchRange arches;
  bool (*supports)(const AttentionArgs&) = nullptr;  // Null: everything valid.
  absl::Status (*launch)(const AttentionArgs&, const Exec&) = nullptr;
};

std::span<const AttentionVariant> AttentionVariants();
absl::Status ValidateAttention(const AttentionArgs& args);

absl::Status LaunchAttentionCpu(const AttentionArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchAttentionCuda(const AttentionArgs& args, const Exec& exec);
absl::Status LaunchAttentionMma(const AttentionArgs& args, const Exec& exec);
absl::Status LaunchAttentionPrefill(const AttentionArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchAttentionPrefill)(const AttentionArgs&,
                                                        const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchAttentionMma)(const AttentionArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchAttentionCuda)(const AttentionArgs&, const Exec&) = nullptr;
#endif

// The definition's loops in f32: the yardstick of bounds, no variant.
absl::Status AttentionNaive(const AttentionArgs& args, const Exec& exec);

// Entries that the query at `position` sees.
inline int64_t VisibleEntries(int64_t position, int64_t ratio) {
  return ratio == 0 ? 0 : (position + 1) / ratio;
}

}  // namespace isthmus::kernels
