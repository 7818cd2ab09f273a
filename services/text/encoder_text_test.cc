// SPDX-License-Identifier: Apache-2.0
// The protocol strings against the SHA-256 sums of the official encoder's (spec 7.3).
#include "services/text/encoder_text.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

#include "absl/strings/escaping.h"

namespace isthmus::text {
namespace {

// The first 32 bits of the fractional part of `root`.
uint32_t FractionBits(long double root) {
  return static_cast<uint32_t>((root - std::floor(root)) * 4294967296.0L);
}

// FIPS 180-4. The constants are computed: fractions of square and cube roots of the first primes.
std::string Sha256(absl::string_view text) {
  std::array<uint32_t, 64> k{};
  std::array<uint32_t, 8> hash{};
  int count = 0;
  for (int n = 2; count < 64; ++n) {
    bool is_prime = true;
    for (int d = 2; d * d <= n; ++d) is_prime = is_prime && n % d != 0;
    if (!is_prime) continue;
    if (count < 8)
      hash[static_cast<size_t>(count)] = FractionBits(std::sqrt(static_cast<long double>(n)));
    k[static_cast<size_t>(count++)] = FractionBits(std::cbrt(static_cast<long double>(n)));
  }
  std::string padded(text);
  padded.push_back('\x80');
  while (padded.size() % 64 != 56) padded.push_back('\0');
  for (int shift = 56; shift >= 0; shift -= 8) {
    padded.push_back(static_cast<char>((uint64_t{text.size()} * 8) >> shift));
  }
  for (size_t block = 0; block < padded.size(); block += 64) {
    std::array<uint32_t, 64> w{};
    for (size_t i = 0; i < 64; ++i) {
      w[i / 4] = i < 64 ? (w[i / 4] << 8) | static_cast<uint8_t>(padded[block + i]) : 0;
    }
    for (size_t i = 16; i < 64; ++i) {
      const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
      const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
      w[i] = w[i - 16] + s0 + w[i - 7] + s1;
    }
    auto [a, b, c, d, e, f, g, h] = hash;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + k[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) hash[i] += add[i];
  }
  std::string bytes;
  for (const uint32_t word : hash) {
    for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<char>(word >> shift));
  }
  return absl::BytesToHexString(bytes);
}

TEST(EncoderTextTest, HashesAsTheStandard) {
  EXPECT_EQ(Sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(EncoderTextTest, IsTheOfficialText) {
  EXPECT_EQ(kMaxEffortApril.size(), 476u);
  EXPECT_EQ(Sha256(kMaxEffortApril),
            "f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7");
  EXPECT_EQ(kToolsBeforeSchemas.size(), 890u);
  EXPECT_EQ(Sha256(kToolsBeforeSchemas),
            "c7c9042638154a237b5d1bd48be772374a35a4d24c5cacfd1ffbd92703da329c");
  EXPECT_EQ(kToolsAfterSchemas.size(), 99u);
  EXPECT_EQ(Sha256(kToolsAfterSchemas),
            "690702850fe256512cb1ee67c4e436ecb3e735c71ebee77ca45ff357a75fb5a7");
  EXPECT_EQ(kResponseFormatHeading.size(), 80u);
  EXPECT_EQ(Sha256(kResponseFormatHeading),
            "5200f58413f49f3957c43beddbc97bead023232cb5934fad0c1997c30c139112");
}

}  // namespace
}  // namespace isthmus::text
