// SPDX-License-Identifier: Apache-2.0
// The variants of the three hyper-connection operations: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/hyper_connection/hyper_connection.h"

namespace isthmus::kernels {

template <typename Args>
struct HyperConnectionVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const Args&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const Args&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted path.
std::span<const HyperConnectionVariant<HyperConnectionPreArgs>> HyperConnectionPreVariants();
std::span<const HyperConnectionVariant<HyperConnectionPostArgs>> HyperConnectionPostVariants();
std::span<const HyperConnectionVariant<HyperConnectionHeadArgs>> HyperConnectionHeadVariants();

absl::Status ValidateHyperConnectionPre(const HyperConnectionPreArgs& args, int arch = kArchCpu);
absl::Status ValidateHyperConnectionPost(const HyperConnectionPostArgs& args, int arch = kArchCpu);
absl::Status ValidateHyperConnectionHead(const HyperConnectionHeadArgs& args, int arch = kArchCpu);

absl::Status LaunchHyperConnectionPreCpu(const HyperConnectionPreArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionPostCpu(const HyperConnectionPostArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionHeadCpu(const HyperConnectionHeadArgs& args, const Exec& exec);

// What the fused kernels (mix_mma.cuh) ask of matrices that they read or write 16 bytes at a time:
// aligned rows, streams and x of one type, hidden in whole blocks, fn in tiles, reference
// arithmetic.
bool IsAligned16(const MatrixView& view);
bool FusesMix(const MatrixView& streams, const WeightView& fn, const MatrixView& x,
              Arithmetic arithmetic);

// Null in a build without CUDA, so that its row of the table is never chosen.
using LaunchPre = absl::Status (*)(const HyperConnectionPreArgs&, const Exec&);
using LaunchPost = absl::Status (*)(const HyperConnectionPostArgs&, const Exec&);
using LaunchHead = absl::Status (*)(const HyperConnectionHeadArgs&, const Exec&);
#if ISTHMUS_HAS_CUDA
absl::Status LaunchHyperConnectionPreCuda(const HyperConnectionPreArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionPostCuda(const HyperConnectionPostArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionHeadCuda(const HyperConnectionHeadArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionPreMma(const HyperConnectionPreArgs& args, const Exec& exec);
absl::Status LaunchHyperConnectionHeadMma(const HyperConnectionHeadArgs& args, const Exec& exec);
#else
inline constexpr LaunchPre LaunchHyperConnectionPreCuda = nullptr;
inline constexpr LaunchPost LaunchHyperConnectionPostCuda = nullptr;
inline constexpr LaunchHead LaunchHyperConnectionHeadCuda = nullptr;
inline constexpr LaunchPre LaunchHyperConnectionPreMma = nullptr;
inline constexpr LaunchHead LaunchHyperConnectionHeadMma = nullptr;
#endif

}  // namespace isthmus::kernels
