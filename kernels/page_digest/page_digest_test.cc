// SPDX-License-Identifier: Apache-2.0
// The digest against the CRC of its bytes written out.
#include "kernels/page_digest/page_digest.h"

#include <cstring>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/inputs.h"
#include "services/base/crc32c.h"

namespace isthmus::kernels {
namespace {

// The bytes of a text, to hold the digest against values that other programs print.
std::span<const std::byte> Text(const char* text) {
  return {reinterpret_cast<const std::byte*>(text), std::strlen(text)};
}

std::vector<std::byte> RandomBytes(uint64_t seed, size_t size) {
  kernels::testing::Random random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.Bits() & 0xffu);
  return bytes;
}

PageCanary SomeCanary() {
  PageCanary canary;
  for (uint8_t i = 0; i < 16; ++i) canary.transfer_id[i] = static_cast<uint8_t>('A' + i);
  canary.cache_kind = 0x33323130;  // "0123" in little endian.
  canary.first_layer = 0x37363534;
  canary.num_layers = 0x62613938;
  canary.first_position = 0x6a69686766656463;
  return canary;
}

TEST(PageDigestTest, RestsOnTheCrcOfThePublishedVector) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
}

// The canary above is the text "A..P0123456789abcdefghij", byte for byte.
TEST(PageDigestTest, IsTheCrcOfTheCanaryInLittleEndianAndThenTheBytes) {
  const char* whole = "ABCDEFGHIJKLMNOP0123456789abcdefghijpage bytes";
  EXPECT_EQ(PageDigest(SomeCanary(), Text("page bytes"), Exec{}),
            Crc32c(whole, std::strlen(whole)));
}

TEST(PageDigestTest, TakesAnEmptyPage) {
  const char* whole = "ABCDEFGHIJKLMNOP0123456789abcdefghij";
  EXPECT_EQ(PageDigest(SomeCanary(), {}, Exec{}), Crc32c(whole, std::strlen(whole)));
}

TEST(PageDigestTest, DiffersWhenIntactBytesBelongElsewhere) {
  const std::vector<std::byte> page = RandomBytes(1, 584);
  const uint32_t digest = PageDigest(SomeCanary(), page, Exec{});
  PageCanary other = SomeCanary();
  other.transfer_id[15] ^= 1u;
  EXPECT_NE(PageDigest(other, page, Exec{}), digest);
  other = SomeCanary();
  ++other.cache_kind;
  EXPECT_NE(PageDigest(other, page, Exec{}), digest);
  other = SomeCanary();
  ++other.first_layer;
  EXPECT_NE(PageDigest(other, page, Exec{}), digest);
  other = SomeCanary();
  ++other.num_layers;
  EXPECT_NE(PageDigest(other, page, Exec{}), digest);
  other = SomeCanary();
  other.first_position += uint64_t{1} << 32;
  EXPECT_NE(PageDigest(other, page, Exec{}), digest);
}

TEST(PageDigestTest, DiffersWhenAnyBitOfThePageDiffers) {
  std::vector<std::byte> page = RandomBytes(2, 584);
  const uint32_t digest = PageDigest(SomeCanary(), page, Exec{});
  for (size_t bit = 0; bit < 8 * page.size(); ++bit) {
    page[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
    EXPECT_NE(PageDigest(SomeCanary(), page, Exec{}), digest) << "bit " << bit;
    page[bit / 8] ^= static_cast<std::byte>(1u << (bit % 8));
  }
}

TEST(PageDigestTest, DiffersWhenAPageIsCutShort) {
  const std::vector<std::byte> page(64, std::byte{0});
  EXPECT_NE(PageDigest(SomeCanary(), page, Exec{}),
            PageDigest(SomeCanary(), std::span(page).first(63), Exec{}));
}

}  // namespace
}  // namespace isthmus::kernels
