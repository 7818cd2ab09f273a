// SPDX-License-Identifier: Apache-2.0
// The conversions of pairs over whole ranges, against the scalar codecs: the same expectations on a
// GPU and in the emulator.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/core/pairs.cuh"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::DeviceCopy;
using kernels::testing::TestDevice;

enum class Conversion : uint8_t { kBf16, kBf16Relu, kF16, kE4m3, kProduct, kBf16Product };

template <Conversion kConversion>
__global__ void Convert(const float* x, uint32_t* out, int pairs) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= pairs) return;
  const float low = x[2 * i];
  const float high = x[2 * i + 1];
  if constexpr (kConversion == Conversion::kBf16) out[i] = Bf16Pair(low, high);
  if constexpr (kConversion == Conversion::kBf16Relu) out[i] = Bf16PairRelu(low, high);
  if constexpr (kConversion == Conversion::kF16) out[i] = F16Pair(low, high);
  if constexpr (kConversion == Conversion::kE4m3) {
    out[i] = F16PairOfE4m3(static_cast<uint32_t>(low) | static_cast<uint32_t>(high) << 8);
  }
  if constexpr (kConversion == Conversion::kProduct) {
    const uint32_t pair = F16Pair(low, high);
    out[i] = MultiplyF16Pair(pair, pair >> 16 | pair << 16);
  }
  if constexpr (kConversion == Conversion::kBf16Product) {
    const uint32_t pair = Bf16Pair(low, high);
    out[i] = MultiplyBf16Pair(pair, pair >> 16 | pair << 16);
  }
}

template <Conversion kConversion>
std::vector<uint32_t> Converted(const std::vector<float>& x) {
  TestDevice device;
  const auto pairs = static_cast<int64_t>(x.size()) / 2;
  const DeviceCopy<float> input(x);
  const DeviceCopy<uint32_t> out(pairs);
  EXPECT_TRUE(Launch("Convert", {.grid = dim3(CeilDiv(pairs, 128)), .block = dim3(128)},
                     device.exec(), Convert<kConversion>, static_cast<const float*>(input.data()),
                     out.data(), static_cast<int>(pairs))
                  .ok());
  device.Finish();
  return out.ToHost();
}

std::vector<float> Values() {
  std::vector<float> x = kernels::testing::NormalValues(3, 2000);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= std::exp2f(static_cast<float>(i % 60) - 40.0f);
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float special : {0.0f, -0.0f, infinity, -infinity, 65504.0f, 65519.0f, 65520.0f,
                              0x1p-24f, 0x1p-25f, 0x1.8p-25f, -0x1p-14f, 0x1.ffcp-15f}) {
    x.push_back(special);
    x.push_back(-special);
  }
  return x;
}

// One f16 value, by arithmetic in f64.
double F16Of(double x) {
  if (x == 0.0 || std::isinf(x)) return x;
  const int exponent = std::max(std::ilogb(x), -14);
  const double rounded = std::ldexp(std::nearbyint(std::ldexp(x, 10 - exponent)), exponent - 10);
  return std::fabs(rounded) > 65504.0 ? std::copysign(HUGE_VAL, x) : rounded;
}
double F16Value(uint32_t bits) {
  const double sign = (bits & 0x8000u) != 0 ? -1.0 : 1.0;
  const int exponent = static_cast<int>(bits >> 10 & 31u);
  const double mantissa = bits & 0x3ffu;
  if (exponent == 31) return mantissa != 0 ? NAN : sign * HUGE_VAL;
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(1024.0 + mantissa, exponent - 25);
}

TEST(PairsTest, RoundToBf16) {
  ISTHMUS_REQUIRE_DEVICE();
  const std::vector<float> x = Values();
  const auto plain = Converted<Conversion::kBf16>(x);
  const auto relu = Converted<Conversion::kBf16Relu>(x);
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_EQ(plain[i], Bf16Bits(x[2 * i]) | uint32_t{Bf16Bits(x[2 * i + 1])} << 16);
    for (size_t half = 0; half < 2; ++half) {
      const float positive = x[2 * i + half] > 0.0f ? x[2 * i + half] : 0.0f;
      const uint32_t got = relu[i] >> (16 * half) & 0xffffu;
      EXPECT_EQ(Bf16Value(static_cast<uint16_t>(got)), Bf16Value(Bf16Bits(positive)));
    }
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const uint32_t both = Converted<Conversion::kBf16Relu>({nan, nan})[0];
  EXPECT_TRUE(std::isnan(Bf16Value(static_cast<uint16_t>(both))));
  EXPECT_TRUE(std::isnan(Bf16Value(static_cast<uint16_t>(both >> 16))));
}

TEST(PairsTest, RoundToF16AndMultiply) {
  ISTHMUS_REQUIRE_DEVICE();
  const std::vector<float> x = Values();
  const auto plain = Converted<Conversion::kF16>(x);
  const auto product = Converted<Conversion::kProduct>(x);
  for (size_t i = 0; i < plain.size(); ++i) {
    const double low = F16Of(double{x[2 * i]});
    const double high = F16Of(double{x[2 * i + 1]});
    EXPECT_EQ(F16Value(plain[i] & 0xffffu), low) << x[2 * i];
    EXPECT_EQ(F16Value(plain[i] >> 16), high) << x[2 * i + 1];
    if (std::isnan(low * high)) continue;
    EXPECT_EQ(F16Value(product[i] & 0xffffu), F16Of(low * high)) << low << ", " << high;
    EXPECT_EQ(F16Value(product[i] >> 16), F16Of(low * high)) << low << ", " << high;
  }
}

TEST(PairsTest, MultiplyBf16) {
  ISTHMUS_REQUIRE_DEVICE();
  const std::vector<float> x = Values();
  const auto product = Converted<Conversion::kBf16Product>(x);
  for (size_t i = 0; i < product.size(); ++i) {
    const float exact = Bf16Value(Bf16Bits(x[2 * i])) * Bf16Value(Bf16Bits(x[2 * i + 1]));
    if (std::isnan(exact)) continue;
    const float want = Bf16Value(Bf16Bits(exact));
    EXPECT_EQ(Bf16Value(static_cast<uint16_t>(product[i])), want) << x[2 * i];
    EXPECT_EQ(Bf16Value(static_cast<uint16_t>(product[i] >> 16)), want) << x[2 * i];
  }
}

TEST(PairsTest, WidenEveryE4m3Code) {
  ISTHMUS_REQUIRE_DEVICE();
  std::vector<float> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<float>(i);
  const auto pairs = Converted<Conversion::kE4m3>(codes);
  for (size_t i = 0; i < 256; ++i) {
    const double got = F16Value(pairs[i / 2] >> (16 * (i % 2)) & 0xffffu);
    const double want = double{Fp8E4m3Value(static_cast<uint8_t>(i))};
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << i;
    } else {
      EXPECT_EQ(got, want) << i;
    }
  }
}

}  // namespace
}  // namespace isthmus::kernels
