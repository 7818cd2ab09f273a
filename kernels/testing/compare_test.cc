// SPDX-License-Identifier: Apache-2.0
// The yardsticks themselves: each must be able to say no.
#include "kernels/testing/compare.h"

#include <limits>
#include <vector>

#include "gtest/gtest.h"

namespace isthmus::kernels::testing {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(CompareTest, RelativeL2OfARowByHand) {
  const std::vector<float> exact = {3.0f, 4.0f};
  EXPECT_DOUBLE_EQ(RelativeL2(std::vector<float>{3.0f, 4.5f}, exact), 0.1);
  EXPECT_EQ(RelativeL2(exact, exact), 0.0);
  EXPECT_EQ(RelativeL2(std::vector<float>{kNan, 4.0f}, exact), kInfinity);
}

TEST(CompareTest, HoldsAVariantToTheNaiveError) {
  const std::vector<float> exact = {3.0f, 4.0f};
  const std::vector<float> naive = {3.0f, 4.05f};  // e = 0.01
  const NumericBound bound = {NumericClass::kReordered, 1.5, 0.0};
  EXPECT_TRUE(WithinBound(std::vector<float>{3.0f, 4.07f}, naive, exact, bound));
  EXPECT_FALSE(WithinBound(std::vector<float>{3.0f, 4.08f}, naive, exact, bound));
}

TEST(CompareTest, WantsNanAndInfinityInTheirPlaces) {
  const std::vector<float> exact = {kNan, kInfinity, 1.0f};
  EXPECT_TRUE(SameNonFinite(exact, exact));
  EXPECT_FALSE(SameNonFinite(std::vector<float>{kNan, -kInfinity, 1.0f}, exact));
  EXPECT_FALSE(SameNonFinite(std::vector<float>{kNan, kInfinity, kNan}, exact));
  EXPECT_FALSE(SameNonFinite(std::vector<float>{1.0f, kInfinity, 1.0f}, exact));
}

TEST(CompareTest, TellsMinusZeroFromZeroByBits) {
  EXPECT_TRUE(SameBits(std::vector<float>{0.0f, kNan}, std::vector<float>{0.0f, kNan}));
  EXPECT_FALSE(SameBits(std::vector<float>{-0.0f}, std::vector<float>{0.0f}));
  EXPECT_FALSE(SameBits(std::vector<float>{}, std::vector<float>{0.0f}));
}

TEST(CompareTest, CountsFlipsOfTheBf16Grid) {
  const std::vector<float> exact(100, 1.0f);
  std::vector<float> naive = exact;
  naive[0] = 1.0078125f;  // One step.
  std::vector<float> got = exact;
  got[5] = got[6] = 0.99609375f;
  EXPECT_TRUE(Bf16FlipsWithin(got, naive, exact, 2.0, 0.0));
  got[7] = 0.99609375f;
  EXPECT_FALSE(Bf16FlipsWithin(got, naive, exact, 2.0, 0.0));
  std::vector<float> far = exact;
  far[3] = 1.015625f;  // Two steps.
  EXPECT_FALSE(Bf16FlipsWithin(far, naive, exact, 2.0, 1.0));
  far[3] = 1.0001f;  // Off the grid.
  EXPECT_FALSE(Bf16FlipsWithin(far, naive, exact, 2.0, 1.0));
}

TEST(CompareTest, SeesAnOverwrittenGuard) {
  GuardedFloats values(3);
  EXPECT_TRUE(values.Intact());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(values.data()) % 64, 0u);
  for (int i = 0; i < 3; ++i) values.data()[i] = 1.0f;
  EXPECT_TRUE(values.Intact());
  values.data()[3] = 1.0f;
  EXPECT_FALSE(values.Intact());
}

}  // namespace
}  // namespace isthmus::kernels::testing
