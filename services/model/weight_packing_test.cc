// SPDX-License-Identifier: Apache-2.0
#include "services/model/weight_packing.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"

namespace isthmus::model {
namespace {

using kernels::kPanelRows;
using kernels::WeightFormat;
using kernels::WeightLayout;
using kernels::WeightView;

std::vector<uint8_t> RandomBytes(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(count);
  for (uint8_t& byte : out) byte = static_cast<uint8_t>(random());
  return out;
}

TEST(WeightPackingTest, InterleavesSixteenRowsByHand) {
  // Two rows of three f32: panel [k][16], rows 2 to 15 zero.
  const std::vector<float> stored = {1, 2, 3, 4, 5, 6};
  WeightView w;
  w.format = WeightFormat::kF32;
  w.rows = 2;
  w.cols = 3;
  w.elements = stored.data();
  ASSERT_EQ(CopiedElementBytes(w), 3 * 16 * 4);
  ASSERT_EQ(CopiedScaleBytes(w), 0);
  std::vector<float> packed(48, -1.0f);
  const WeightView out = CopyToPanels(w, reinterpret_cast<uint8_t*>(packed.data()), nullptr);
  EXPECT_EQ(out.layout, WeightLayout::kPanels);
  EXPECT_EQ(out.elements, packed.data());
  std::vector<float> wanted(48, 0.0f);
  wanted[0] = 1;
  wanted[1] = 4;
  wanted[16] = 2;
  wanted[17] = 5;
  wanted[32] = 3;
  wanted[33] = 6;
  EXPECT_EQ(packed, wanted);
}

TEST(WeightPackingTest, PutsEveryByteWhereTheLayoutSays) {
  constexpr int64_t kRows = 37;
  constexpr int64_t kCols = 64;
  const struct {
    WeightFormat format;
    int64_t unit_bytes, units, group_units;  // group_units: fp4 scales per row.
  } kCases[] = {{WeightFormat::kF32, 4, kCols, 0},
                {WeightFormat::kBf16, 2, kCols, 0},
                {WeightFormat::kFp8Block128, 1, kCols, 0},
                {WeightFormat::kMxfp4, 1, kCols / 2, kCols / 32},
                {WeightFormat::kNvfp4, 1, kCols / 2, kCols / 16}};
  for (const auto& c : kCases) {
    const auto elements = RandomBytes(static_cast<size_t>(kRows * c.units * c.unit_bytes), 1);
    const auto scales = RandomBytes(static_cast<size_t>(kRows * 4), 2);
    WeightView w;
    w.format = c.format;
    w.rows = kRows;
    w.cols = kCols;
    w.elements = elements.data();
    w.scales = scales.data();
    std::vector<uint8_t> packed(static_cast<size_t>(CopiedElementBytes(w)), 0xee);
    std::vector<uint8_t> packed_scales(static_cast<size_t>(CopiedScaleBytes(w)), 0xee);
    CopyToPanels(w, packed.data(), packed_scales.data());
    for (int64_t n = 0; n < 48; ++n) {
      for (int64_t u = 0; u < c.units * c.unit_bytes; ++u) {
        const int64_t at = ((n / 16) * c.units + u / c.unit_bytes) * 16 * c.unit_bytes +
                           (n % 16) * c.unit_bytes + u % c.unit_bytes;
        const int wanted =
            n < kRows ? elements[static_cast<size_t>(n * c.units * c.unit_bytes + u)] : 0;
        ASSERT_EQ(packed[static_cast<size_t>(at)], wanted) << n << " " << u;
      }
      for (int64_t g = 0; g < c.group_units; ++g) {
        const int64_t at = ((n / 16) * c.group_units + g) * 16 + n % 16;
        const int wanted = n < kRows ? scales[static_cast<size_t>(n * c.group_units + g)] : 0;
        ASSERT_EQ(packed_scales[static_cast<size_t>(at)], wanted) << n << " " << g;
      }
    }
    if (c.format == WeightFormat::kFp8Block128) {
      ASSERT_EQ(packed_scales.size(), 1u);
      EXPECT_EQ(packed_scales[0], scales[0]);
    }
  }
}

TEST(WeightPackingTest, KeepsFp8BlockScalesAsStored) {
  WeightView w;
  w.format = WeightFormat::kFp8Block128;
  w.rows = 130;
  w.cols = 260;
  EXPECT_EQ(CopiedElementBytes(w), 144 * 260);
  EXPECT_EQ(CopiedScaleBytes(w), 2 * 3);
}

// An NVFP4 matrix of `rows` x 64 whose scales are all `scale`.
struct Nvfp4Matrix {
  Nvfp4Matrix(int64_t rows, uint8_t scale, float global)
      : elements(RandomBytes(static_cast<size_t>(rows * 32), 3)),
        scales(static_cast<size_t>(rows * 4), scale) {
    view.format = WeightFormat::kNvfp4;
    view.rows = rows;
    view.cols = 64;
    view.elements = elements.data();
    view.scales = scales.data();
    view.global_scale = global;
  }
  std::vector<uint8_t> elements;
  std::vector<uint8_t> scales;
  WeightView view;
};

TEST(LosslessCastTest, TakesEveryPowerOfTwoAndNothingElse) {
  for (int code = 0; code < 256; ++code) {
    const float value = kernels::Fp8E4m3Value(static_cast<uint8_t>(code));
    int exponent = 0;
    const bool is_power = value > 0.0f && std::frexp(value, &exponent) == 0.5f;
    const Nvfp4Matrix m(3, static_cast<uint8_t>(code), 0x1p-9f);
    EXPECT_EQ(InspectScales(m.view, false).is_mxfp4_cast, is_power) << code;
  }
}

TEST(LosslessCastTest, WantsAGlobalScaleThatIsAPowerOfTwo) {
  for (const float global : {0.0f, -0x1p-9f, 0.75f, INFINITY, NAN}) {
    EXPECT_FALSE(InspectScales(Nvfp4Matrix(3, 0x38, global).view, false).is_mxfp4_cast) << global;
  }
  EXPECT_TRUE(InspectScales(Nvfp4Matrix(3, 0x38, 1.0f).view, false).is_mxfp4_cast);
}

TEST(LosslessCastTest, WantsAnExponentThatUe8m0Holds) {
  // 0x38 is 1.0: the exponent is that of the global scale.
  EXPECT_TRUE(InspectScales(Nvfp4Matrix(3, 0x38, 0x1p127f).view, false).is_mxfp4_cast);
  EXPECT_FALSE(InspectScales(Nvfp4Matrix(3, 0x40, 0x1p127f).view, false).is_mxfp4_cast);
  EXPECT_TRUE(InspectScales(Nvfp4Matrix(3, 0x38, 0x1p-127f).view, false).is_mxfp4_cast);
  EXPECT_FALSE(InspectScales(Nvfp4Matrix(3, 0x30, 0x1p-127f).view, false).is_mxfp4_cast);
}

TEST(LosslessCastTest, WantsEqualHalves) {
  Nvfp4Matrix m(3, 0x38, 0x1p-9f);
  m.scales[2 * 4 + 3] = 0x40;
  EXPECT_FALSE(InspectScales(m.view, false).is_mxfp4_cast);
  m.scales[2 * 4 + 2] = 0x40;
  EXPECT_TRUE(InspectScales(m.view, false).is_mxfp4_cast);
}

TEST(LosslessCastTest, SampleReadsTheFirstAndTheMiddleRow) {
  for (int64_t row = 0; row < 8; ++row) {
    Nvfp4Matrix m(8, 0x38, 0x1p-9f);
    m.scales[static_cast<size_t>(row * 4)] = 0x39;
    EXPECT_FALSE(InspectScales(m.view, false).is_mxfp4_cast) << row;
    EXPECT_EQ(InspectScales(m.view, true).is_mxfp4_cast, row != 0 && row != 4) << row;
  }
}

TEST(LosslessCastTest, RebuildsTheSameValues) {
  Nvfp4Matrix m(2, 0x38, 0x1p-9f);
  const uint8_t codes[] = {1, 1, 2, 2, 4, 4, 0x78, 0x78};
  std::memcpy(m.scales.data(), codes, 8);
  std::vector<uint8_t> rebuilt(4);
  const WeightView out = RebuildMxfp4(m.view, rebuilt.data());
  EXPECT_EQ(out.format, WeightFormat::kMxfp4);
  EXPECT_EQ(out.elements, m.elements.data());
  EXPECT_EQ(out.global_scale, 1.0f);
  // 2^-9, 2^-8, 2^-7, 2^8, each times 2^-9, biased by 127.
  EXPECT_EQ(rebuilt, (std::vector<uint8_t>{109, 110, 111, 126}));
}

TEST(InspectScalesTest, FindsTheFirstNan) {
  Nvfp4Matrix m(3, 0x38, 1.0f);
  EXPECT_FALSE(InspectScales(m.view, false).nan_at.has_value());
  m.scales[2 * 4 + 1] = 0xff;
  ScaleFindings found = InspectScales(m.view, false);
  ASSERT_TRUE(found.nan_at.has_value());
  EXPECT_EQ(*found.nan_at, std::make_pair(int64_t{2}, int64_t{1}));
  EXPECT_EQ(found.nan_byte, 0xff);
  m.scales[1] = 0x7f;
  EXPECT_EQ(*InspectScales(m.view, false).nan_at, std::make_pair(int64_t{0}, int64_t{1}));

  m.view.format = WeightFormat::kMxfp4;  // There 0x7f is 1; two scales a row.
  EXPECT_FALSE(InspectScales(m.view, false).nan_at.has_value());
  m.scales[5] = 0xff;
  EXPECT_EQ(*InspectScales(m.view, false).nan_at, std::make_pair(int64_t{2}, int64_t{1}));
}

TEST(InspectScalesTest, ReadsEveryFp8BlockEvenInASample) {
  std::vector<uint8_t> scales(4 * 2, 127);
  WeightView w;
  w.format = WeightFormat::kFp8Block128;
  w.rows = 500;
  w.cols = 200;
  w.scales = scales.data();
  EXPECT_FALSE(InspectScales(w, true).nan_at.has_value());
  scales[7] = 255;
  EXPECT_EQ(*InspectScales(w, true).nan_at, std::make_pair(int64_t{3}, int64_t{1}));
}

}  // namespace
}  // namespace isthmus::model
