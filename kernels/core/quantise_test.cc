// SPDX-License-Identifier: Apache-2.0
// Every vector codec against the scalar codecs of formats.h, bit for bit, on every SIMD target.
#include "kernels/core/quantise.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"

namespace isthmus::kernels {
namespace {

using testing::NormalValues;
using testing::OutlierValues;
using testing::SameBits;

using QuantiseTargetTest = testing::SimdTargetTest;
ISTHMUS_INSTANTIATE_SIMD_TARGETS(QuantiseTargetTest);

// Ends and ties of every format, both signs.
std::vector<float> EdgeValues() {
  std::vector<float> out;
  for (int code = 0; code < 0x7f; ++code) {
    const float x = Fp8E4m3Value(static_cast<uint8_t>(code));
    const float next = Fp8E4m3Value(static_cast<uint8_t>(std::min(code + 1, 0x7e)));
    const float tie = 0.5f * (x + next);
    for (const float v : {x, tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 1e9f)}) {
      out.push_back(v);
      out.push_back(-v);
    }
  }
  for (int i = 0; i < 64; ++i) out.push_back(0.125f * static_cast<float>(i - 32));
  return out;
}

float Amax(const float* x, int64_t n) {
  float amax = 0.0f;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, std::fabs(x[i]));
  return amax;
}

TEST_P(QuantiseTargetTest, RoundsToBf16LikeTheScalarCodec) {
  std::vector<float> x;
  for (uint32_t i = 0; i < (1u << 18); ++i) x.push_back(std::bit_cast<float>(i << 14 | (i & 1)));
  x.push_back(std::bit_cast<float>(0xffc12345u));
  std::vector<float> got(x.size());
  std::vector<float> expected;
  for (const float v : x) expected.push_back(RoundBf16(v));
  RoundBf16Row(x.data(), static_cast<int64_t>(x.size()), got.data());
  EXPECT_TRUE(SameBits(got, expected));
}

std::vector<float> ScalarFp8RoundTrip(const std::vector<float>& x, int64_t block) {
  std::vector<float> out(x.size());
  const auto n = static_cast<int64_t>(x.size());
  for (int64_t k = 0; k < n; k += block) {
    const int64_t count = std::min(block, n - k);
    const float s = PowerOfTwo(Fp8ScaleExponent(Amax(&x[static_cast<size_t>(k)], count)));
    for (auto i = static_cast<size_t>(k); i < static_cast<size_t>(k + count); ++i) {
      out[i] = Fp8E4m3Value(Fp8E4m3Code(x[i] / s)) * s;
    }
  }
  return out;
}

TEST_P(QuantiseTargetTest, RoundTripsFp8LikeTheScalarCodec) {
  std::vector<std::vector<float>> cases = {EdgeValues(),
                                           std::vector<float>(128, 0.0f),
                                           {1e-30f, -1e-38f, 0x1p-149f, -0.0f},
                                           std::vector<float>(3, 3e38f)};
  for (const int64_t n : {1, 15, 16, 17, 128, 300, 4096}) {
    cases.push_back(OutlierValues(static_cast<uint64_t>(n), n, 0.3f));
    cases.push_back(NormalValues(static_cast<uint64_t>(n), n, 1e-6f));
  }
  for (const auto& x : cases) {
    for (const int64_t block : {32, 64, 128}) {
      std::vector<float> got(x.size());
      RoundTripFp8Row(x.data(), static_cast<int64_t>(x.size()), block, got.data());
      EXPECT_TRUE(SameBits(got, ScalarFp8RoundTrip(x, block))) << x.size() << " by " << block;
      std::vector<float> in_place = x;
      RoundTripFp8Row(in_place.data(), static_cast<int64_t>(x.size()), block, in_place.data());
      EXPECT_TRUE(SameBits(in_place, got));
    }
  }
}

TEST_P(QuantiseTargetTest, RoundTripsFp4LikeTheScalarCodec) {
  std::vector<std::vector<float>> cases = {EdgeValues(), std::vector<float>(32, 0.0f)};
  for (const int64_t n : {1, 31, 32, 33, 128, 1000}) {
    cases.push_back(OutlierValues(static_cast<uint64_t>(n), n, 0.3f));
  }
  for (const auto& x : cases) {
    const auto n = static_cast<int64_t>(x.size());
    std::vector<float> expected(x.size());
    for (int64_t k = 0; k < n; k += 32) {
      const int64_t count = std::min<int64_t>(32, n - k);
      const float s = PowerOfTwo(Fp4ScaleExponent(Amax(&x[static_cast<size_t>(k)], count)));
      for (auto i = static_cast<size_t>(k); i < static_cast<size_t>(k + count); ++i) {
        expected[i] = Fp4E2m1Value(Fp4E2m1Code(x[i] / s)) * s;
      }
    }
    std::vector<float> got(x.size());
    RoundTripFp4Row(x.data(), n, got.data());
    EXPECT_TRUE(SameBits(got, expected)) << n;
  }
}

// A NaN spoils its own element and no other; an infinity spoils its group.
TEST_P(QuantiseTargetTest, KeepsNanInItsPlace) {
  std::vector<float> x = NormalValues(7, 256);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  x[200] = -std::numeric_limits<float>::infinity();
  std::vector<float> got(x.size());
  RoundTripFp8Row(x.data(), 256, 128, got.data());
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(std::isnan(got[i]), i == 3) << i;
  for (size_t i = 128; i < 256; ++i) EXPECT_TRUE(std::isnan(got[i])) << i;
}

TEST_P(QuantiseTargetTest, EncodesKvEntriesLikeTheScalarCodec) {
  constexpr int kHead = 512;
  constexpr int kRope = 64;
  std::vector<float> x = OutlierValues(5, kHead, 0.5f);
  for (int i = kHead - kRope; i < kHead; ++i) x[size_t(i)] = RoundBf16(x[size_t(i)]);
  std::byte data[kHead + kRope];
  std::byte scale[8];
  EncodeKvEntry(x.data(), kHead, kRope, data, scale);

  const auto* codes = reinterpret_cast<const uint8_t*>(data);
  std::vector<float> expected(x.size());
  for (int k = 0; k < kHead - kRope; k += 64) {
    const int exponent = Fp8ScaleExponent(Amax(&x[size_t(k)], 64));
    EXPECT_EQ(static_cast<int>(scale[k / 64]), exponent + 127);
    for (int i = k; i < k + 64; ++i) {
      const uint8_t code = Fp8E4m3Code(x[size_t(i)] / PowerOfTwo(exponent));
      EXPECT_EQ(codes[i], code) << i;
      expected[size_t(i)] = Fp8E4m3Value(code) * PowerOfTwo(exponent);
    }
  }
  EXPECT_EQ(static_cast<int>(scale[7]), 0);
  for (int i = kHead - kRope; i < kHead; ++i) expected[size_t(i)] = x[size_t(i)];
  std::vector<float> decoded(x.size());
  DecodeKvEntry(data, scale, kHead, kRope, decoded.data());
  EXPECT_TRUE(SameBits(decoded, expected));
}

// Entries without a NaN are decoded another way than those with one.
TEST_P(QuantiseTargetTest, DecodesEveryFp8CodeLikeTheScalarCodec) {
  for (const bool has_nan : {true, false}) {
    std::byte data[256];
    for (int i = 0; i < 256; ++i) {
      data[i] = static_cast<std::byte>(!has_nan && (i & 0x7f) == 0x7f ? i - 1 : i);
    }
    for (int s = 0; s < 256; ++s) {
      std::byte scale[8] = {};
      for (auto& b : scale) b = static_cast<std::byte>(s);
      std::vector<float> got(256);
      DecodeKvEntry(data, scale, 256, 0, got.data());
      for (int i = 0; i < 256; ++i) {
        const float expected =
            Fp8E4m3Value(static_cast<uint8_t>(data[i])) * Ue8m0Value(static_cast<uint8_t>(s));
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(got[size_t(i)])) << i << " by " << s;
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(got[size_t(i)]), std::bit_cast<uint32_t>(expected))
              << i << " by " << s;
        }
      }
    }
  }
}

TEST_P(QuantiseTargetTest, EncodesIndexKeysLikeTheScalarCodec) {
  for (const int dim : {32, 64, 128}) {
    const std::vector<float> x = OutlierValues(uint64_t(dim), dim, 0.5f);
    std::vector<std::byte> data(size_t(dim / 2));
    std::vector<std::byte> scale(size_t(dim / 32));
    EncodeIndexKey(x.data(), dim, data.data(), scale.data());
    std::vector<float> expected(x.size());
    RoundTripFp4Row(x.data(), dim, expected.data());
    for (int i = 0; i < dim; ++i) {
      const int exponent = Fp4ScaleExponent(Amax(&x[size_t(i / 32 * 32)], 32));
      EXPECT_EQ(static_cast<int>(scale[size_t(i / 32)]), exponent + 127);
      const int pair = static_cast<int>(data[size_t(i / 2)]);
      const int code = i % 2 == 0 ? pair & 15 : pair >> 4;
      EXPECT_EQ(code, Fp4E2m1Code(x[size_t(i)] / PowerOfTwo(exponent))) << i;
    }
    std::vector<float> decoded(x.size());
    DecodeIndexKey(data.data(), scale.data(), dim, decoded.data());
    EXPECT_TRUE(SameBits(decoded, expected));
  }
}

TEST_P(QuantiseTargetTest, MatchesTheGoldenActQuant) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_act_quant.safetensors");
  const std::vector<int64_t> dims = file.dims();  // n, dim, block
  const std::vector<float> x = file.at("x").F32();
  std::vector<float> got(x.size());
  for (int64_t row = 0; row < dims[0]; ++row) {
    RoundTripFp8Row(&x[size_t(row * dims[1])], dims[1], dims[2], &got[size_t(row * dims[1])]);
  }
  EXPECT_TRUE(SameBits(got, file.at("y_ref").F32()));
}

TEST(FormatsTest, AmaxOf448GivesScaleOneAndTheFloorGivesMinus22) {
  EXPECT_EQ(Fp8ScaleExponent(448.0f), 0);
  EXPECT_EQ(Fp8ScaleExponent(std::nextafter(448.0f, 500.0f)), 1);
  EXPECT_EQ(Fp8ScaleExponent(0.0f), -22);
  EXPECT_EQ(Fp4ScaleExponent(6.0f), 0);
}

TEST(FormatsTest, CodesComeBackFromTheirValues) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(Fp8E4m3Code(Fp8E4m3Value(static_cast<uint8_t>(code))), code);
  }
  for (int code = 0; code < 16; ++code) {
    EXPECT_EQ(Fp4E2m1Code(Fp4E2m1Value(static_cast<uint8_t>(code))), code);
  }
  EXPECT_EQ(Fp4E2m1Code(0.25f), 0);  // Ties go to the even code.
  EXPECT_EQ(Fp4E2m1Code(0.75f), 2);
  EXPECT_EQ(Fp4E2m1Code(5.0f), 6);
}

}  // namespace
}  // namespace isthmus::kernels
