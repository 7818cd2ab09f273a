// SPDX-License-Identifier: Apache-2.0
// The sequences of a batch in device memory, which kernels read when they run, so that a captured
// graph serves any lengths and pages. Beside SequenceKv, the host's form of the same (kv_layout.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/core/host_device.h"
#include "kernels/core/kv_layout.h"

namespace isthmus::kernels {

struct DeviceSequence {
  int32_t first_row = 0;
  int32_t num_rows = 0;        // New tokens of this step; 0 for padding.
  int32_t start_position = 0;  // Absolute position of the first new token.
  int32_t unused = 0;
  std::byte* state = nullptr;  // The state slot.
  // Base addresses of the pages per paged kind, in token order, in device memory.
  std::byte* const* pages[kNumPagedKinds] = {};
};

// All pointers are device memory; the struct itself travels by value. Rows and sequences count what
// is launched: a graph's bucket. Padding rows have row_sequence -1; they read no cache and write
// nothing.
struct DeviceBatch {
  const DeviceSequence* sequences = nullptr;  // [num_sequences]
  const int32_t* row_sequence = nullptr;      // [rows], index into sequences, or -1
  const int32_t* row_position = nullptr;      // [rows], absolute; 0 in padding rows
  int64_t rows = 0;
  int64_t num_sequences = 0;
  // Bounds for the shape of launches, fixed at capture: no sequence has more rows in this step, or
  // more tokens after it.
  int64_t max_rows_per_sequence = 1;
  int64_t max_tokens = 0;
};

// EntryPlane and PagedEntries for kernels.
ISTHMUS_HOST_DEVICE inline std::byte* EntryData(const EntryPlane& plane, std::byte* base,
                                                int64_t entry) {
  return base + plane.data_offset + entry * plane.data_bytes;
}
ISTHMUS_HOST_DEVICE inline std::byte* EntryScale(const EntryPlane& plane, std::byte* base,
                                                 int64_t entry) {
  return base + plane.scale_offset + entry * plane.scale_bytes;
}
// The page of entry `e` of a sequence; e % plane.entries is its place there.
ISTHMUS_HOST_DEVICE inline std::byte* PageOf(const DeviceSequence& sequence, int kind,
                                             const EntryPlane& plane, int64_t e) {
  return sequence.pages[kind][e / plane.entries];
}

}  // namespace isthmus::kernels
