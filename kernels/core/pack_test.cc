// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/pack.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

TEST(PackTest, PutsOneInputOfSixteenOutputsSideBySide) {
  std::vector<uint8_t> elements(18 * 3);
  for (size_t i = 0; i < elements.size(); ++i) elements[i] = static_cast<uint8_t>(i + 1);
  const uint8_t scale = 127;
  WeightView w;
  w.format = WeightFormat::kFp8Block128;
  w.rows = 18;
  w.cols = 3;
  w.elements = elements.data();
  w.scales = &scale;
  ASSERT_EQ(PackedElementBytes(w), 32 * 3);
  EXPECT_EQ(PackedScaleBytes(w), 0);
  std::vector<std::byte> out(32 * 3, std::byte{0xee});

  const WeightView packed = PackWeight(w, out.data(), nullptr);

  EXPECT_EQ(packed.layout, WeightLayout::kPanels);
  EXPECT_EQ(packed.elements, out.data());
  EXPECT_EQ(packed.scales, &scale);  // Block scales are used as stored.
  const auto byte = [&](size_t i) { return static_cast<int>(out[i]); };
  EXPECT_EQ(byte(0), 1);             // Row 0, k 0.
  EXPECT_EQ(byte(1), 4);             // Row 1, k 0.
  EXPECT_EQ(byte(16), 2);            // Row 0, k 1.
  EXPECT_EQ(byte(48 + 0), 49);       // Second panel: row 16, k 0.
  EXPECT_EQ(byte(48 + 32 + 1), 54);  // Row 17, k 2.
  EXPECT_EQ(byte(48 + 2), 0);        // Row 18 does not exist.
}

TEST(PackTest, RepacksFp4ScalesPerGroup) {
  const testing::OwnedWeight w = testing::RandomWeight(1, WeightFormat::kNvfp4, 20, 64);
  const testing::OwnedWeight packed = testing::Packed(w.view);
  EXPECT_EQ(PackedElementBytes(w.view), 32 * 32);
  EXPECT_EQ(PackedScaleBytes(w.view), 32 * 4);
  for (size_t n = 0; n < 20; ++n) {
    for (size_t g = 0; g < 4; ++g) {
      EXPECT_EQ(packed.scales[n / 16 * 64 + g * 16 + n % 16], w.scales[n * 4 + g]);
    }
  }
  EXPECT_EQ(packed.scales[64 + 4], 0);  // Row 20 does not exist.
}

}  // namespace
}  // namespace isthmus::kernels
