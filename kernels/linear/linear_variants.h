// SPDX-License-Identifier: Apache-2.0
// The variants of linear; internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/linear/linear.h"

namespace isthmus::kernels {

struct LinearVariant {
  const Patch* patch;  // Null: a trusted path.
  ArchRange arches;
  bool (*supports)(const LinearArgs&);  // Null: everything that the contract allows.
  absl::Status (*launch)(const LinearArgs&, const Exec&);
  // At most kMaxLinearsTogether that `supports` takes and RunTogether allows. Null: one by one.
  absl::Status (*launch_many)(std::span<const LinearArgs>, const Exec&) = nullptr;
};

inline constexpr size_t kMaxLinearsTogether = 8;
// One launch may compute both: the same format, K, tokens and quantisation.
bool RunTogether(const LinearArgs& a, const LinearArgs& b);

absl::Status ValidateLinear(const LinearArgs& args);
std::span<const LinearVariant> LinearVariants();
// What the patches take: few tokens and many.
inline constexpr int64_t kSwapAbTokens = 64;
inline constexpr int64_t kFewTokens = 8;  // Of which swap_ab has a kernel of its own.
bool FitsSwapAb(const LinearArgs& args);
bool FitsTilesLarge(const LinearArgs& args);

absl::Status LaunchLinearCpu(const LinearArgs& args, const Exec& exec);
void QuantiseActivationCpu(const MatrixView& x, const MatrixView& out, const Exec& exec);

// In a build without CUDA null, so that the row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchLinearCuda(const LinearArgs& args, const Exec& exec);
absl::Status LaunchLinearSwapAb(const LinearArgs& args, const Exec& exec);
absl::Status LaunchLinearManySwapAb(std::span<const LinearArgs> linears, const Exec& exec);
bool FitsFewTokens(std::span<const LinearArgs> linears);
absl::Status LaunchLinearManyFewTokens(std::span<const LinearArgs> linears, const Exec& exec);
// Of linears that may each run together, quantised fp8 and bf16, in one launch.
bool FitsTwoFormats(std::span<const LinearArgs> first, std::span<const LinearArgs> second);
absl::Status LaunchLinearTwoFormats(std::span<const LinearArgs> first,
                                    std::span<const LinearArgs> second, const Exec& exec);
absl::Status LaunchLinearTilesLarge(const LinearArgs& args, const Exec& exec);
absl::Status LaunchLinearManyTilesLarge(std::span<const LinearArgs> linears, const Exec& exec);
absl::Status LaunchQuantiseActivationCuda(const MatrixView& x, const MatrixView& out,
                                          const Exec& exec);
#else
inline constexpr absl::Status (*LaunchLinearCuda)(const LinearArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchLinearSwapAb)(const LinearArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchLinearManySwapAb)(std::span<const LinearArgs>,
                                                        const Exec&) = nullptr;
inline bool FitsTwoFormats(std::span<const LinearArgs>, std::span<const LinearArgs>) {
  return false;
}
inline absl::Status LaunchLinearTwoFormats(std::span<const LinearArgs>, std::span<const LinearArgs>,
                                           const Exec&) {
  return absl::UnimplementedError("linear: built without CUDA");
}
inline constexpr absl::Status (*LaunchLinearTilesLarge)(const LinearArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchLinearManyTilesLarge)(std::span<const LinearArgs>,
                                                            const Exec&) = nullptr;
inline absl::Status LaunchQuantiseActivationCuda(const MatrixView&, const MatrixView&,
                                                 const Exec&) {
  return absl::UnimplementedError("quantise_activation: built without CUDA");
}
#endif

}  // namespace isthmus::kernels
