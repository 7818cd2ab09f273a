// SPDX-License-Identifier: Apache-2.0
// CRC32C against published vectors and against a bit-by-bit definition.
#include "services/base/crc32c.h"

#include <cstring>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace isthmus {
namespace {

// The definition: the reflected polynomial 0x1EDC6F41, one bit at a time.
uint32_t BitByBit(const std::vector<uint8_t>& bytes) {
  uint32_t crc = 0xffffffffu;
  for (const uint8_t byte : bytes) {
    crc ^= byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1u) != 0 ? 0x82f63b78u : 0u);
  }
  return crc ^ 0xffffffffu;
}

std::vector<uint8_t> Pattern(size_t size) {
  std::vector<uint8_t> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 151 + (i >> 3));
  return bytes;
}

TEST(Crc32cTest, GivesThePublishedValueOfTheNineDigits) {
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283u);
}

// RFC 3720, appendix B.4.
TEST(Crc32cTest, GivesTheValuesOfTheIscsiStandard) {
  const std::vector<uint8_t> zeros(32, 0);
  const std::vector<uint8_t> ones(32, 0xff);
  std::vector<uint8_t> ascending(32);
  std::vector<uint8_t> descending(32);
  for (uint8_t i = 0; i < 32; ++i) {
    ascending[i] = i;
    descending[i] = static_cast<uint8_t>(31 - i);
  }
  EXPECT_EQ(Crc32c(zeros.data(), 32), 0x8a9136aau);
  EXPECT_EQ(Crc32c(ones.data(), 32), 0x62a8ab43u);
  EXPECT_EQ(Crc32c(ascending.data(), 32), 0x46dd794eu);
  EXPECT_EQ(Crc32c(descending.data(), 32), 0x113fdb5cu);
}

TEST(Crc32cTest, OfNothingIsWhatItContinuesFrom) {
  EXPECT_EQ(Crc32c(nullptr, 0), 0u);
  EXPECT_EQ(Crc32c(nullptr, 0, 0x12345678u), 0x12345678u);
}

TEST(Crc32cTest, AgreesWithTheDefinitionAtEveryLength) {
  for (size_t size = 0; size < 70; ++size) {
    const std::vector<uint8_t> bytes = Pattern(size);
    EXPECT_EQ(Crc32c(bytes.data(), size), BitByBit(bytes)) << "size " << size;
  }
}

TEST(Crc32cTest, AgreesWithTheDefinitionAtEveryAlignment) {
  const std::vector<uint8_t> bytes = Pattern(64);
  for (size_t start = 0; start < 16; ++start) {
    const std::vector<uint8_t> part(bytes.begin() + static_cast<int64_t>(start), bytes.end());
    EXPECT_EQ(Crc32c(bytes.data() + start, bytes.size() - start), BitByBit(part))
        << "start " << start;
  }
}

TEST(Crc32cTest, ContinuesAcrossAnyCut) {
  const std::vector<uint8_t> bytes = Pattern(41);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t head = Crc32c(bytes.data(), cut);
    EXPECT_EQ(Crc32c(bytes.data() + cut, bytes.size() - cut, head), whole) << "cut " << cut;
  }
}

TEST(Crc32cTest, ChangesWithEverySingleBit) {
  std::vector<uint8_t> bytes = Pattern(24);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
    EXPECT_NE(Crc32c(bytes.data(), bytes.size()), whole) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1u << (bit % 8));
  }
}

}  // namespace
}  // namespace isthmus
