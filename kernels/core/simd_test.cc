// SPDX-License-Identifier: Apache-2.0
// The building blocks of simd-inl.h: the same bits as the scalar forms and on every target.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/math.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/core/simd_test.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

size_t LanesT() { return kLanes; }
float DotT(const float* a, const float* b, size_t n) { return Dot16(a, b, n); }
float SumT(const float* a, size_t n) { return Sum16(a, n); }
float MaxAbsT(const float* a, size_t n) { return MaxAbs16(a, n); }
void TileT(const float* const* a, const float* const* b, size_t n, float* out) {
  DotTile16<2, 3>(a, b, n, out);
}
void SquareTileT(const float* const* a, const float* const* b, size_t n, float* out) {
  DotTile16<4, 4>(a, b, n, out);
}
void ExpT(const float* x, size_t n, float* out) {
  MapRow16([](VF v) HWY_ATTR { return ExpV(v); }, x, n, out);
}
void SigmoidT(const float* x, size_t n, float* out) {
  MapRow16([](VF v) HWY_ATTR { return SigmoidV(v); }, x, n, out);
}
void AxpyT(float a, const float* x, size_t n, float* y) { Axpy16(a, x, n, y); }

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
HWY_EXPORT(LanesT);
HWY_EXPORT(DotT);
HWY_EXPORT(SumT);
HWY_EXPORT(MaxAbsT);
HWY_EXPORT(TileT);
HWY_EXPORT(SquareTileT);
HWY_EXPORT(ExpT);
HWY_EXPORT(SigmoidT);
HWY_EXPORT(AxpyT);

namespace {

using testing::NormalValues;

// The definition of the order: lane i of 16 takes k = i (mod 16), then +8, +4, +2, +1.
float FoldLanes(std::vector<float> lanes) {
  for (size_t step = 8; step >= 1; step /= 2) {
    for (size_t i = 0; i < step; ++i) lanes[i] += lanes[i + step];
  }
  return lanes[0];
}
float ScalarDot(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<float> lanes(16, 0.0f);
  for (size_t k = 0; k < a.size(); ++k) lanes[k % 16] = std::fma(a[k], b[k], lanes[k % 16]);
  return FoldLanes(lanes);
}

class SimdTargetsTest : public testing::SimdTargetTest {};
ISTHMUS_INSTANTIATE_SIMD_TARGETS(SimdTargetsTest);

TEST(SimdTest, CompilesAvx2AndAvx512AndNothingBelow) {
  EXPECT_EQ(HWY_TARGETS, HWY_AVX2 | HWY_AVX3);
  EXPECT_EQ(HWY_STATIC_TARGET, HWY_AVX2);
}

TEST_P(SimdTargetsTest, RunsTheForcedTarget) {
  EXPECT_EQ(HWY_DYNAMIC_DISPATCH(LanesT)(), GetParam() == HWY_AVX2 ? 8u : 16u);
}

TEST_P(SimdTargetsTest, SumsInTheNamedOrder) {
  for (const int64_t n : {0, 1, 7, 8, 9, 15, 16, 17, 100, 512, 515}) {
    const std::vector<float> a = NormalValues(1 + uint64_t(n), n);
    const std::vector<float> b = NormalValues(1000 + uint64_t(n), n);
    std::vector<float> lanes(16, 0.0f);
    float largest = 0.0f;
    for (size_t k = 0; k < a.size(); ++k) {
      lanes[k % 16] += a[k];
      largest = std::max(largest, std::fabs(a[k]));
    }
    const auto size = static_cast<size_t>(n);
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(DotT)(a.data(), b.data(), size), ScalarDot(a, b)) << n;
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(SumT)(a.data(), size), FoldLanes(lanes)) << n;
    EXPECT_EQ(HWY_DYNAMIC_DISPATCH(MaxAbsT)(a.data(), size), largest) << n;
  }
}

TEST_P(SimdTargetsTest, GivesADotProductTheSameBitsInATile) {
  std::vector<std::vector<float>> rows;
  for (uint64_t i = 0; i < 5; ++i) rows.push_back(NormalValues(50 + i, 203));
  const float* a[] = {rows[0].data(), rows[1].data()};
  const float* b[] = {rows[2].data(), rows[3].data(), rows[4].data()};
  float out[6];
  HWY_DYNAMIC_DISPATCH(TileT)(a, b, 203, out);
  for (size_t i = 0; i < 2; ++i) {
    for (size_t j = 0; j < 3; ++j) EXPECT_EQ(out[i * 3 + j], ScalarDot(rows[i], rows[2 + j]));
  }
}

// Sixteen sums are folded together.
TEST_P(SimdTargetsTest, GivesADotProductTheSameBitsInASquareTile) {
  for (const size_t n : {size_t{5}, size_t{64}, size_t{203}}) {
    std::vector<std::vector<float>> rows;
    const float* pointers[8];
    for (uint64_t i = 0; i < 8; ++i) {
      rows.push_back(NormalValues(70 + i, static_cast<int64_t>(n)));
      pointers[i] = rows.back().data();
    }
    float out[16];
    HWY_DYNAMIC_DISPATCH(SquareTileT)(pointers, pointers + 4, n, out);
    for (size_t i = 0; i < 4; ++i) {
      for (size_t j = 0; j < 4; ++j) EXPECT_EQ(out[i * 4 + j], ScalarDot(rows[i], rows[4 + j]));
    }
  }
}

TEST_P(SimdTargetsTest, ExpAndSigmoidGiveTheScalarBits) {
  std::vector<float> x = NormalValues(9, 100003, 30.0f);
  for (const float v :
       {0.0f, -0.0f, 88.72f, 88.73f, 89.0f, 1e30f, -87.4f, -103.0f, -104.0f, -1e30f,
        std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
        std::numeric_limits<float>::quiet_NaN()}) {
    x.push_back(v);
  }
  std::vector<float> got(x.size());
  std::vector<float> expected;
  for (const float v : x) expected.push_back(Exp(v));
  HWY_DYNAMIC_DISPATCH(ExpT)(x.data(), x.size(), got.data());
  EXPECT_TRUE(testing::SameBits(got, expected));
  x.pop_back();  // The sign of a NaN that went through Neg is not promised.
  got.pop_back();
  expected.clear();
  for (const float v : x) expected.push_back(Sigmoid(v));
  HWY_DYNAMIC_DISPATCH(SigmoidT)(x.data(), x.size(), got.data());
  EXPECT_TRUE(testing::SameBits(got, expected));
}

TEST_P(SimdTargetsTest, AxpyTouchesNothingBeyondItsEnd) {
  for (const int64_t n : {0, 1, 8, 13, 16, 31}) {
    testing::GuardedFloats y(n);
    const std::vector<float> x = NormalValues(3, n);
    for (int64_t i = 0; i < n; ++i) y.data()[i] = static_cast<float>(i);
    HWY_DYNAMIC_DISPATCH(AxpyT)(0.3f, x.data(), static_cast<size_t>(n), y.data());
    EXPECT_TRUE(y.Intact()) << n;
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(y.data()[i], std::fma(0.3f, x[static_cast<size_t>(i)], static_cast<float>(i)));
    }
  }
}

}  // namespace
}  // namespace isthmus::kernels
#endif  // HWY_ONCE
