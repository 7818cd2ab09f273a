// SPDX-License-Identifier: Apache-2.0
// The variant record of the compressor and its launchers. Internal to this folder and its tests.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/compressor/compressor.h"
#include "kernels/core/exec.h"
#include "kernels/core/host_device.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

struct CompressorVariant {
  const Patch* patch = nullptr;  // Null: the trusted path.
  ArchRange arches;
  bool (*supports)(const CompressorArgs&) = nullptr;  // Null: everything valid.
  absl::Status (*launch)(const CompressorArgs&, const Exec&) = nullptr;
};

std::span<const CompressorVariant> CompressorVariants();
absl::Status ValidateCompressor(const CompressorArgs& args, int arch = kArchCpu);

absl::Status LaunchCompressorCpu(const CompressorArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchCompressorCuda(const CompressorArgs& args, const Exec& exec);
absl::Status LaunchCompressorFused(const CompressorArgs& args, const Exec& exec);
#else
inline constexpr absl::Status (*LaunchCompressorCuda)(const CompressorArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchCompressorFused)(const CompressorArgs&,
                                                       const Exec&) = nullptr;
#endif

// The definition's loops in f32: the yardstick of bounds, no variant.
absl::Status CompressorNaive(const CompressorArgs& args, const Exec& exec);

// Channels [0, dim) of one token's row, already offset to the half that the entry uses.
struct PoolRow {
  const float* u = nullptr;
  const float* g = nullptr;
};

inline constexpr int64_t kMaxPoolRows = 128;

// out[d] = softmax over rows of g[., d], times u[., d]. dim is a multiple of 16.
void PoolRowsCpu(std::span<const PoolRow> rows, int64_t dim, float* out);

inline int64_t CompressorWidth(const CompressorArgs& args) {
  return args.ratio == 4 ? 2 * args.dim : args.dim;
}
// Rows of the ring: two windows for the overlapping ratio, one for the other.
ISTHMUS_HOST_DEVICE inline int64_t CompressorRing(int64_t ratio) { return ratio == 4 ? 8 : ratio; }

// The first position, of a sequence of `end` tokens, whose row a future entry still reads.
ISTHMUS_HOST_DEVICE inline int64_t FirstKeptPosition(int64_t end, int64_t ratio) {
  const int64_t first = end / ratio * ratio - (ratio == 4 ? ratio : 0);
  return first > 0 ? first : 0;
}

// The first position of entry `j`'s rows.
ISTHMUS_HOST_DEVICE inline int64_t FirstPooledPosition(int64_t j, int64_t ratio) {
  return ratio == 4 && j > 0 ? ratio * (j - 1) : ratio * j;
}

}  // namespace isthmus::kernels
