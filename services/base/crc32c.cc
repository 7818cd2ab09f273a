// SPDX-License-Identifier: Apache-2.0
#include "services/base/crc32c.h"

#include <nmmintrin.h>

#include <cstring>

namespace isthmus {

uint32_t Crc32c(const void* bytes, size_t size, uint32_t crc) {
  const auto* p = static_cast<const unsigned char*>(bytes);
  uint64_t value = crc ^ 0xffffffffu;
  for (; size >= 8; size -= 8, p += 8) {
    uint64_t word = 0;
    std::memcpy(&word, p, 8);
    value = _mm_crc32_u64(value, word);
  }
  auto narrow = static_cast<uint32_t>(value);
  for (; size > 0; --size, ++p) narrow = _mm_crc32_u8(narrow, *p);
  return narrow ^ 0xffffffffu;
}

}  // namespace isthmus
