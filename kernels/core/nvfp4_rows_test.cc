// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/nvfp4_rows.h"

#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

std::vector<float> RoundTrip(const std::vector<float>& x) {
  std::vector<float> out(x.size());
  RoundTripNvfp4Row(x.data(), static_cast<int64_t>(x.size()), out.data());
  return out;
}

// amax 2688 makes s 1. Scales: 448 for the first 16; 15 / 6 = 2.5 for the second, whose values are
// then 2.5 times a code: 6, 3, 0.5, -1, and 2.4 / 2.5 goes to 1.
TEST(Nvfp4RowsTest, MatchesARowRoundedByHand) {
  std::vector<float> x(32, 0.0f);
  x[0] = 2688.0f;
  x[1] = -448.0f;
  x[2] = 100.0f;  // Less than a quarter of 448.
  x[16] = 15.0f;
  x[17] = 7.5f;
  x[18] = 1.25f;
  x[19] = -2.5f;
  x[20] = 2.4f;
  std::vector<float> want(32, 0.0f);
  want[0] = 2688.0f;
  want[1] = -448.0f;
  want[2] = 0.0f;
  want[16] = 15.0f;
  want[17] = 7.5f;
  want[18] = 1.25f;
  want[19] = -2.5f;
  want[20] = 2.5f;
  EXPECT_EQ(RoundTrip(x), want);
}

TEST(Nvfp4RowsTest, AGroupFarBelowTheLargestIsZero) {
  std::vector<float> x(48, 0.0f);
  x[3] = 2688.0f;
  x[20] = 0x1p-9f * 6.0f;   // The smallest scale.
  x[40] = 0x1p-11f * 6.0f;  // Below half of it.
  const std::vector<float> out = RoundTrip(x);
  EXPECT_EQ(out[20], x[20]);
  EXPECT_EQ(out[40], 0.0f);
}

TEST(Nvfp4RowsTest, ZeroStaysAndANumberThatIsNoneSpoilsItsRow) {
  EXPECT_EQ(RoundTrip(std::vector<float>(20, 0.0f)), std::vector<float>(20, 0.0f));
  EXPECT_EQ(RoundTrip(std::vector<float>(20, 0x1p-101f)), std::vector<float>(20, 0.0f));
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    std::vector<float> x(33, 1.0f);
    x[32] = bad;
    for (const float value : RoundTrip(x)) EXPECT_TRUE(std::isnan(value));
  }
}

// A power of two moves the row's scale and no code; of one that is not, codes may turn.
TEST(Nvfp4RowsTest, DoesNotDependOnTheRowsPowerOfTwo) {
  const std::vector<float> x = testing::NormalValues(3, 512);
  const std::vector<float> out = RoundTrip(x);
  for (const float factor : {0x1p-60f, 0x1p40f}) {
    std::vector<float> scaled = x;
    for (float& value : scaled) value *= factor;
    const std::vector<float> got = RoundTrip(scaled);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(got[i], out[i] * factor) << i;
  }
}

TEST(Nvfp4RowsTest, LosesATenthOfNormalValues) {
  const std::vector<float> x = testing::NormalValues(5, 1 << 16);
  const double error = testing::RelativeL2(RoundTrip(x), x);
  EXPECT_GT(error, 0.08);
  EXPECT_LT(error, 0.11);  // The specification's simulation: 0.095.
}

}  // namespace
}  // namespace isthmus::kernels
