// SPDX-License-Identifier: Apache-2.0
// libm appears here and only here, as the yardstick.
#include "kernels/core/math.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "gtest/gtest.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

// Distance of `got` from `exact` in units of the last place of an f32.
double UlpError(float got, long double exact) {
  const auto nearest = static_cast<float>(exact);
  const float next = std::nextafter(std::fabs(nearest), std::numeric_limits<float>::infinity());
  const double ulp = double{next} - std::fabs(double{nearest});
  return std::fabs(static_cast<double>(got - exact)) / ulp;
}

TEST(MathTest, ExpIsWithinTwoUlp) {
  double worst = 0.0;
  for (int i = 0; i <= 2000000; ++i) {
    const float x = -104.0f + static_cast<float>(i) * (192.7f / 2000000.0f);
    worst = std::max(worst, UlpError(Exp(x), std::exp(static_cast<long double>(x))));
  }
  EXPECT_LE(worst, 2.0);
  EXPECT_GT(worst, 0.0);
}

TEST(MathTest, ExpKnowsItsEnds) {
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-200.0f), 0.0f);
  EXPECT_EQ(Exp(-std::numeric_limits<float>::infinity()), 0.0f);
  EXPECT_EQ(Exp(89.0f), std::numeric_limits<float>::infinity());
  EXPECT_EQ(Exp(std::numeric_limits<float>::infinity()), std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_EQ(Exp(-103.0f), 0x1p-149f);  // e^-103 = 2^-148.6: the smallest subnormal.
}

TEST(MathTest, SigmoidIsSymmetric) {
  EXPECT_EQ(Sigmoid(0.0f), 0.5f);
  EXPECT_EQ(Sigmoid(-200.0f), 0.0f);
  EXPECT_EQ(Sigmoid(200.0f), 1.0f);
  EXPECT_NEAR(Sigmoid(1.0f), 0.73105858f, 1e-7f);
}

// Values of specification 5.1.
TEST(MathTest, SqrtSoftplusMatchesTheSpecification) {
  EXPECT_NEAR(SqrtSoftplus(-30.0f), 3.06e-7f, 1e-9f);
  EXPECT_NEAR(SqrtSoftplus(-20.0f), 4.54e-5f, 1e-7f);
  EXPECT_FLOAT_EQ(SqrtSoftplus(0.0f), 0.83255461f);
  EXPECT_FLOAT_EQ(SqrtSoftplus(20.0f), 4.47213595f);
  EXPECT_FLOAT_EQ(SqrtSoftplus(1e30f), 1e15f);
  EXPECT_EQ(SqrtSoftplus(-std::numeric_limits<float>::infinity()), 0.0f);
}

TEST(MathTest, SqrtSoftplusRoundsTheExactValue) {
  testing::Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const float x = random.Uniform(-60.0f, 60.0f);
    const long double exact = std::sqrt(std::log1p(std::exp(static_cast<long double>(x))));
    ASSERT_LE(UlpError(SqrtSoftplus(x), exact), 0.5001) << x;
  }
}

TEST(MathTest, SinAndCosRoundTheExactValueForLongContexts) {
  testing::Random random(2);
  for (int i = 0; i < 400000; ++i) {
    const float x = random.Uniform(-1.0f, 1.0f) * ((i & 1) != 0 ? 0x1p21f : 0x1p31f);
    float sin = 0.0f;
    float cos = 0.0f;
    SinCos(x, &sin, &cos);
    const long double s = std::sin(static_cast<long double>(x));
    const long double c = std::cos(static_cast<long double>(x));
    ASSERT_LE(std::fabs(static_cast<double>(sin - s)), 0x1p-25 + 0x1p-45) << x;
    ASSERT_LE(std::fabs(static_cast<double>(cos - c)), 0x1p-25 + 0x1p-45) << x;
  }
}

TEST(MathTest, SinAndCosKnowTheQuadrants) {
  const float half_pi = 1.57079637f;
  for (int q = 0; q < 4; ++q) {
    float sin = 0.0f;
    float cos = 0.0f;
    SinCos(half_pi * static_cast<float>(q), &sin, &cos);
    const float expected_sin[] = {0.0f, 1.0f, 0.0f, -1.0f};
    const float expected_cos[] = {1.0f, 0.0f, -1.0f, 0.0f};
    EXPECT_NEAR(sin, expected_sin[q], 3e-7f) << q;
    EXPECT_NEAR(cos, expected_cos[q], 3e-7f) << q;
  }
  float sin = 1.0f;
  float cos = 0.0f;
  SinCos(0.0f, &sin, &cos);
  EXPECT_EQ(sin, 0.0f);
  EXPECT_EQ(cos, 1.0f);
}

TEST(MathTest, ExpAndLogInDoubleAreWithinFourUlp) {
  testing::Random random(3);
  for (int i = 0; i < 200000; ++i) {
    const double x = random.Uniform(-700.0f, 700.0f);
    const double e = std::exp(x);
    ASSERT_NEAR(ExpF64(x) / e, 1.0, 0x1p-50) << x;
    const double y = std::fabs(random.Normal()) * std::pow(2.0, double(random.Below(600) - 300));
    if (y == 0.0) continue;
    const double l = std::log(y);
    ASSERT_NEAR(LogF64(y), l, 0x1p-50 * std::fabs(l)) << y;
  }
  EXPECT_EQ(LogF64(1.0), 0.0);
  EXPECT_EQ(LogF64(0.0), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(LogF64(-1.0)));
  EXPECT_NEAR(LogF64(0x1p-1070), -1070 * 0.6931471805599453, 1e-12);
  EXPECT_EQ(ExpF64(-800.0), 0.0);
  EXPECT_EQ(ExpF64(710.0), std::numeric_limits<double>::infinity());
}

}  // namespace
}  // namespace isthmus::kernels
