// SPDX-License-Identifier: Apache-2.0
// The variants of post_pre: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/core/choose.h"
#include "kernels/fused/post_pre/post_pre.h"

namespace isthmus::kernels {

struct PostPreVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const PostPreArgs&) = nullptr;  // Null: every valid shape.
  absl::Status (*launch)(const PostPreArgs&, const Exec&) = nullptr;
};

// Fastest first; the trusted path comes last.
std::span<const PostPreVariant> PostPreVariants();

absl::Status ValidatePostPre(const PostPreArgs& args, int arch = kArchCpu);

// The three operations one after the other, each in its own variant.
absl::Status LaunchPostPreInTurn(const PostPreArgs& args, const Exec& exec);

// Two launches; the precision is that of fn in the mix. Null in a build without CUDA.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchPostPreF32(const PostPreArgs& args, const Exec& exec);
absl::Status LaunchPostPreBf16HiLo(const PostPreArgs& args, const Exec& exec);
absl::Status LaunchPostPreTf32(const PostPreArgs& args, const Exec& exec);
absl::Status LaunchPostPreBf16(const PostPreArgs& args, const Exec& exec);
#else
using LaunchPostPre = absl::Status (*)(const PostPreArgs&, const Exec&);
inline constexpr LaunchPostPre LaunchPostPreF32 = nullptr;
inline constexpr LaunchPostPre LaunchPostPreBf16HiLo = nullptr;
inline constexpr LaunchPostPre LaunchPostPreTf32 = nullptr;
inline constexpr LaunchPostPre LaunchPostPreBf16 = nullptr;
#endif

}  // namespace isthmus::kernels
