// SPDX-License-Identifier: Apache-2.0
// The variant record of the indexer and its launchers. Internal to this folder and its tests.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
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

// The definition's loops in f32: the yardstick of bounds, no variant.
absl::Status IndexerNaive(const IndexerArgs& args, const Exec& exec);

// Tokens per entry: the indexer exists only in layers of this ratio.
inline constexpr int64_t kIndexRatio = 4;

inline int64_t VisibleKeys(int64_t position) { return (position + 1) / kIndexRatio; }

// Writes the indices of the min(topk, visible) largest of scores[visible], larger score first, then
// smaller index, NaN last, and -1 up to topk. `keys` is scratch of `visible` elements.
void SelectTopK(const float* scores, int64_t visible, int64_t topk, uint64_t* keys,
                int32_t* selected);

}  // namespace isthmus::kernels
