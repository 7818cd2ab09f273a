// SPDX-License-Identifier: Apache-2.0
// What every kernel of the indexer asks about a row of the batch.
#pragma once

#include "kernels/core/device_batch.h"
#include "kernels/core/launch.cuh"
#include "kernels/indexer/indexer_variants.h"

namespace isthmus::kernels {

// A row of the batch, or none: padding.
struct IndexerRow {
  const DeviceSequence* sequence = nullptr;
  int64_t visible = 0;  // Keys.
};

__device__ __forceinline__ IndexerRow RowOf(const DeviceBatch& batch, int64_t row) {
  const int32_t sequence = batch.row_sequence[row];
  const int32_t position = batch.row_position[row];  // Both are on their way together.
  if (sequence < 0) return {};
  return {batch.sequences + sequence, VisibleKeys(position)};
}

}  // namespace isthmus::kernels
