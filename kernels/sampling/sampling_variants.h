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

struct SamplingBatchVariant {
  const Patch* patch = nullptr;
  ArchRange arches;
  bool (*supports)(const SamplingBatchArgs&) = nullptr;
  absl::Status (*launch)(const SamplingBatchArgs&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const SamplingVariant> SamplingVariants();
std::span<const SamplingBatchVariant> SamplingBatchVariants();

absl::Status ValidateSamplingArgs(const SamplingArgs& args);
// `arch` is that of the Exec: on a device only shapes are checked, not what stands in its memory.
absl::Status ValidateSamplingBatch(const SamplingBatchArgs& args, int arch);

// Whether LaunchSampleCandidates takes the arguments; it may still leave them to LaunchSampleCpu.
bool RanksCandidates(const SamplingArgs& args);
absl::StatusOr<int32_t> LaunchSampleCandidates(const SamplingArgs& args, const Exec& exec);
absl::StatusOr<int32_t> LaunchSampleCpu(const SamplingArgs& args, const Exec& exec);
absl::Status LaunchSampleBatchCpu(const SamplingBatchArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchSampleBatchCuda(const SamplingBatchArgs& args, const Exec& exec);
absl::Status LaunchSampleBuckets(const SamplingBatchArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchSampleBatchCuda)(const SamplingBatchArgs&,
                                                       const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchSampleBuckets)(const SamplingBatchArgs&,
                                                     const Exec&) = nullptr;
#endif

}  // namespace isthmus::kernels
