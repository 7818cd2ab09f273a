// SPDX-License-Identifier: Apache-2.0
// CRC32C (Castagnoli), as computed by the SSE4.2 instruction. Debian has no library for it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace isthmus {

// CRC32C of `size` bytes, continuing from `crc` (0 to start): Crc32c(b, Crc32c(a)) = Crc32c(ab).
uint32_t Crc32c(const void* bytes, size_t size, uint32_t crc = 0);

}  // namespace isthmus
