// SPDX-License-Identifier: Apache-2.0
// What is moved and where it may go, in pages and bytes. Nothing here knows layers or heads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace isthmus::transfer {

// Memory that its owner lets others write into: `num_units` pages (or state slots) of `unit_bytes`
// each, one after another. The owner keeps it alive for as long as the transport.
struct LocalRegion {
  std::byte* base = nullptr;
  uint64_t unit_bytes = 0;
  uint64_t num_units = 0;
};

// One write: local bytes to the start of one unit of a peer's region.
struct PageSpan {
  std::span<const std::byte> bytes;  // At most unit_bytes; alive until the write has returned.
  uint32_t region = 0;
  uint32_t region_generation = 0;
  uint32_t unit = 0;
};

}  // namespace isthmus::transfer
