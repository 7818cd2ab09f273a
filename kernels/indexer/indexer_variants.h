// SPDX-License-Identifier: Apache-2.0
// The variant record of the indexer and its launchers. Internal to this folder and its tests.
#pragma once

#include <bit>
#include <cmath>
#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/host_device.h"
#include "kernels/indexer/indexer.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

struct IndexerVariant {
  const Patch* patch = nullptr;  // Null: the trusted path.
  ArchRange arches;
  bool (*supports)(const IndexerArgs&) = nullptr;  // Null: everything valid.
  absl::Status (*launch)(const IndexerArgs&, const Exec&) = nullptr;
};

std::span<const IndexerVariant> IndexerVariants();
absl::Status ValidateIndexer(const IndexerArgs& args);

absl::Status LaunchIndexerCpu(const IndexerArgs& args, const Exec& exec);
// Null in a build without CUDA, so that its row of the table is never chosen.
#if ISTHMUS_HAS_CUDA
absl::Status LaunchIndexerCuda(const IndexerArgs& args, const Exec& exec);
absl::Status LaunchIndexQueryCuda(const MatrixView& q, int64_t num_heads, int64_t dim,
                                  const Exec& exec);
#else
inline constexpr absl::Status (*LaunchIndexerCuda)(const IndexerArgs&, const Exec&) = nullptr;
inline constexpr absl::Status (*LaunchIndexQueryCuda)(const MatrixView&, int64_t, int64_t,
                                                      const Exec&) = nullptr;
#endif

// The definition's loops in f32: the yardstick of bounds, no variant.
absl::Status IndexerNaive(const IndexerArgs& args, const Exec& exec);

// Tokens per entry: the indexer exists only in layers of this ratio.
inline constexpr int64_t kIndexRatio = 4;

ISTHMUS_HOST_DEVICE inline int64_t VisibleKeys(int64_t position) {
  return (position + 1) / kIndexRatio;
}

// A row that sees at most topk entries selects them all, and needs scores only for a dump.
ISTHMUS_HOST_DEVICE inline bool NeedsScores(int64_t visible, int64_t topk, bool has_dump) {
  return visible > 0 && (has_dump || visible > topk);
}

// Ascending in this is: larger score first, both zeros alike, NaN last.
ISTHMUS_HOST_DEVICE inline uint32_t ScoreRank(float score) {
  if (std::isnan(score)) return 0xffffffffu;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0f);  // -0 becomes +0.
  return (bits & 0x80000000u) != 0 ? bits : ~(bits | 0x80000000u);
}

// Channels of a head that the trusted kernels hold in shared memory.
inline constexpr int64_t kMaxDeviceDim = 256;

// Writes the indices of the min(topk, visible) largest of scores[visible], larger score first, then
// smaller index, NaN last, and -1 up to topk. `keys` is scratch of `visible` elements.
void SelectTopK(const float* scores, int64_t visible, int64_t topk, uint64_t* keys,
                int32_t* selected);

}  // namespace isthmus::kernels
