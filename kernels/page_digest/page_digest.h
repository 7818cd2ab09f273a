// SPDX-License-Identifier: Apache-2.0
// The digest of a page group: CRC32C over a canary and the bytes, so that bytes that are intact but
// belong elsewhere (another sequence, kind, layer run or position) do not verify.
//
//   digest = crc32c(canary: transfer_id[16] | cache_kind u32 | first_layer u32 | num_layers u32 |
//                   first_position u64, little endian; then the bytes)
//
// Phases     Transfer.
// Errors     None; any size is valid.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/core/exec.h"

namespace isthmus::kernels {

struct PageCanary {
  std::array<uint8_t, 16> transfer_id{};
  uint32_t cache_kind = 0;   // Index in KvLayout::kinds.
  uint32_t first_layer = 0;  // Index in the kind's layers.
  uint32_t num_layers = 0;
  uint64_t first_position = 0;  // Of the page's first token; 0 for state slots.
};

uint32_t PageDigest(const PageCanary& canary, std::span<const std::byte> bytes, const Exec& exec);

}  // namespace isthmus::kernels
