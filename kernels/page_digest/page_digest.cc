// SPDX-License-Identifier: Apache-2.0
// The digest itself: the canary in a fixed byte order, then the bytes. The CRC instruction runs at
// about the speed of memory, so there is one path and no table of variants.
#include "kernels/page_digest/page_digest.h"

#include <algorithm>

#include "services/base/crc32c.h"

namespace isthmus::kernels {
namespace {

constexpr size_t kCanaryBytes = 16 + 3 * 4 + 8;

// Appends `size` bytes of `value`, least significant first.
uint8_t* PutLittleEndian(uint64_t value, int size, uint8_t* out) {
  for (int i = 0; i < size; ++i) *out++ = static_cast<uint8_t>(value >> (8 * i));
  return out;
}

}  // namespace

uint32_t PageDigest(const PageCanary& canary, std::span<const std::byte> bytes, const Exec&) {
  std::array<uint8_t, kCanaryBytes> head;
  uint8_t* out = std::copy(canary.transfer_id.begin(), canary.transfer_id.end(), head.data());
  out = PutLittleEndian(canary.cache_kind, 4, out);
  out = PutLittleEndian(canary.first_layer, 4, out);
  out = PutLittleEndian(canary.num_layers, 4, out);
  PutLittleEndian(canary.first_position, 8, out);
  return Crc32c(bytes.data(), bytes.size(), Crc32c(head.data(), head.size()));
}

}  // namespace isthmus::kernels
