// SPDX-License-Identifier: Apache-2.0
// The block-scaled instructions over whole tiles, bit for bit against plain loops over unpacked
// numbers: which element, which scale. Inputs are small enough that every sum is exact in f32. Runs
// in the emulator; on a GPU of another architecture it is skipped and counted.
#include "kernels/core/sm120/block_scaled_mma.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::DeviceCopy;
using kernels::testing::Random;
using kernels::testing::TestDevice;

bool HasBlockScaledMma() {
  return NumDevices() > 0 && (!IsRealDevice() || PropertiesOf(0).value().arch == kArchSm120);
}

// A [16][K] and B [8][K] as bytes of elements, K contiguous; scales [16][runs], [8][runs].
template <int kBits, Element8 kA>
__global__ void ScaledProduct(const uint8_t* a_bytes, const uint8_t* b_bytes,
                              const uint8_t* scales_a, const uint8_t* scales_b, float* out) {
  constexpr int kRuns = kBits == 4 ? 4 : 1;
  constexpr int kRowBytes = 32;
  const int g = static_cast<int>(threadIdx.x) / 4;
  const int t = static_cast<int>(threadIdx.x) % 4;
  const auto word = [](const uint8_t* p) { return *reinterpret_cast<const uint32_t*>(p); };
  uint32_t a[4];
  uint32_t b[2];
  for (int w = 0; w < 4; ++w) {
    a[w] = word(a_bytes + (g + 8 * (w % 2)) * kRowBytes + 16 * (w / 2) + 4 * t);
  }
  for (int w = 0; w < 2; ++w) b[w] = word(b_bytes + g * kRowBytes + 16 * w + 4 * t);
  uint32_t scale_a = 0;
  uint32_t scale_b = 0;
  for (int r = 0; r < kRuns; ++r) {
    // Lanes that the instruction does not ask hold other numbers.
    const uint32_t from_a = t < 2 ? scales_a[(g + 8 * t) * kRuns + r] : 99u;
    const uint32_t from_b = t < 1 ? scales_b[g * kRuns + r] : 99u;
    scale_a |= from_a << (8 * r);
    scale_b |= from_b << (8 * r);
  }
  float c[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if constexpr (kBits == 4) {
    MmaNvfp4(c, a, b, scale_a, scale_b);
  } else {
    MmaMxf8f6f4<kA, Element8::kE4m3>(c, a, b, scale_a, scale_b);
  }
  for (int i = 0; i < 4; ++i) out[(g + (i >= 2 ? 8 : 0)) * 8 + 2 * t + i % 2] = c[i];
}

// Random bytes of whole tiles; 8-bit elements are small multiples of 1 / 8.
std::vector<uint8_t> RandomBytes(uint64_t seed, int64_t count, Element8 kind, bool nibbles) {
  Random random(seed);
  std::vector<uint8_t> out(static_cast<size_t>(count));
  for (uint8_t& byte : out) {
    if (nibbles) {
      byte = static_cast<uint8_t>(random.Below(256));
    } else if (kind == Element8::kE2m1) {
      byte = static_cast<uint8_t>(random.Below(16) << 2);
    } else {
      byte = Fp8E4m3Code(static_cast<float>(random.Below(31) - 15) / 8.0f);
    }
  }
  return out;
}

template <int kBits, Element8 kA>
void ExpectTile(uint64_t seed) {
  if (!HasBlockScaledMma()) GTEST_SKIP() << "no GPU with block-scaled mma";
  constexpr int64_t kK = kBits == 4 ? 64 : 32;
  constexpr int64_t kRuns = kBits == 4 ? 4 : 1;
  TestDevice device;
  const auto a = RandomBytes(seed, 16 * 32, kA, kBits == 4);
  const auto b = RandomBytes(seed + 1, 8 * 32, Element8::kE4m3, kBits == 4);
  Random random(seed + 2);
  std::vector<uint8_t> scales_a(16 * kRuns);
  std::vector<uint8_t> scales_b(8 * kRuns);
  for (auto* scales : {&scales_a, &scales_b}) {
    for (uint8_t& scale : *scales) {
      scale = static_cast<uint8_t>(kBits == 4 ? 40 + random.Below(24) : 125 + random.Below(5));
    }
  }
  const DeviceCopy<uint8_t> device_a(a);
  const DeviceCopy<uint8_t> device_b(b);
  const DeviceCopy<uint8_t> device_scales_a(scales_a);
  const DeviceCopy<uint8_t> device_scales_b(scales_b);
  const DeviceCopy<float> out(128);
  ASSERT_TRUE(Launch("ScaledProduct", {.grid = dim3(1), .block = dim3(32)}, device.exec(),
                     ScaledProduct<kBits, kA>, static_cast<const uint8_t*>(device_a.data()),
                     static_cast<const uint8_t*>(device_b.data()),
                     static_cast<const uint8_t*>(device_scales_a.data()),
                     static_cast<const uint8_t*>(device_scales_b.data()), out.data())
                  .ok());
  device.Finish();
  const auto got = out.ToHost();
  const auto element = [](const std::vector<uint8_t>& bytes, int64_t row, int64_t k,
                          Element8 kind) {
    if (kBits == 4) {
      return double{Fp4E2m1Value(
          static_cast<uint8_t>(bytes[static_cast<size_t>(row * 32 + k / 2)] >> (4 * (k % 2))))};
    }
    const uint8_t byte = bytes[static_cast<size_t>(row * 32 + k)];
    return double{kind == Element8::kE2m1 ? Fp4E2m1Value(byte >> 2) : Fp8E4m3Value(byte)};
  };
  const auto scale = [](uint8_t byte) {
    return double{kBits == 4 ? Fp8E4m3Value(byte) : Ue8m0Value(byte)};
  };
  for (int64_t m = 0; m < 16; ++m) {
    for (int64_t n = 0; n < 8; ++n) {
      double sum = 1.0;
      for (int64_t k = 0; k < kK; ++k) {
        const int64_t run = k / 16 % kRuns;
        sum += element(a, m, k, kA) * scale(scales_a[static_cast<size_t>(m * kRuns + run)]) *
               element(b, n, k, Element8::kE4m3) *
               scale(scales_b[static_cast<size_t>(n * kRuns + run)]);
      }
      EXPECT_EQ(got[static_cast<size_t>(m * 8 + n)], static_cast<float>(sum)) << m << ", " << n;
    }
  }
}

TEST(BlockScaledMmaTest, MultipliesE4m3ByE4m3) {
  for (uint64_t seed = 1; seed < 20; ++seed) ExpectTile<8, Element8::kE4m3>(seed);
}
TEST(BlockScaledMmaTest, MultipliesE2m1ByE4m3) {
  for (uint64_t seed = 1; seed < 20; ++seed) ExpectTile<8, Element8::kE2m1>(seed);
}
TEST(BlockScaledMmaTest, MultipliesNvfp4) {
  for (uint64_t seed = 1; seed < 20; ++seed) ExpectTile<4, Element8::kE2m1>(seed);
}

__global__ void Split(const uint32_t* words, uint32_t* low, uint32_t* high) {
  SplitFp4ForMxf8(words[threadIdx.x], low[threadIdx.x], high[threadIdx.x]);
}

TEST(BlockScaledMmaTest, SplitsTheNibblesOfATile) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  Random random(3);
  std::vector<uint32_t> words(32);
  for (uint32_t& word : words) word = static_cast<uint32_t>(random.Bits());
  const DeviceCopy<uint32_t> input(words);
  const DeviceCopy<uint32_t> low(32);
  const DeviceCopy<uint32_t> high(32);
  ASSERT_TRUE(Launch("Split", {.grid = dim3(1), .block = dim3(32)}, device.exec(), Split,
                     static_cast<const uint32_t*>(input.data()), low.data(), high.data())
                  .ok());
  device.Finish();
  const auto lows = low.ToHost();
  const auto highs = high.ToHost();
  for (size_t i = 0; i < 32; ++i) {
    for (unsigned e = 0; e < 4; ++e) {
      const uint32_t byte = words[i] >> (8 * e) & 0xffu;
      EXPECT_EQ(lows[i] >> (8 * e) & 0xffu, (byte & 15u) << 2);
      EXPECT_EQ(highs[i] >> (8 * e) & 0xffu, (byte >> 4) << 2);
    }
  }
}

}  // namespace
}  // namespace isthmus::kernels
