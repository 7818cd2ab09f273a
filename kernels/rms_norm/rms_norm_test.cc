// SPDX-License-Identifier: Apache-2.0
// By hand, refusals, invariance, and every variant of rms_norm within its bound.
#include "kernels/rms_norm/rms_norm.h"

#include <cmath>
#include <limits>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/rms_norm/rms_norm_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const RmsNormVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using kernels::testing::GuardedFloats;
using kernels::testing::NormalValues;
using kernels::testing::OutlierValues;
using kernels::testing::SameBits;
using kernels::testing::WithinBound;
using ::testing::HasSubstr;

// Normalises [rows, hidden] with `weight` (may be empty).
std::vector<float> Normalised(std::vector<float> x, int64_t hidden,
                              const std::vector<float>& weight, Arithmetic arithmetic,
                              const Exec& exec = {}) {
  const auto rows = static_cast<int64_t>(x.size()) / hidden;
  std::vector<float> out(x.size());
  const RmsNormArgs args = {.x = F32Matrix(x.data(), rows, hidden),
                            .weight = F32Vector(weight.data(), static_cast<int64_t>(weight.size())),
                            .out = F32Matrix(out.data(), rows, hidden),
                            .arithmetic = arithmetic};
  const absl::Status status = RmsNorm(args, exec);
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

struct HandCase {
  std::vector<float> x = {3.0f, 4.0f, 0.0f, 0.0f};
  std::vector<float> weight = {1.0f, 2.0f, 1.0f, 1.0f};
  std::vector<float> out = std::vector<float>(4);
  RmsNormArgs args = {.x = F32Matrix(x.data(), 1, 4),
                      .weight = F32Vector(weight.data(), 4),
                      .out = F32Matrix(out.data(), 1, 4),
                      .epsilon = 0.0f,
                      .arithmetic = Arithmetic::kMath};
};

TEST(RmsNormTest, DefinitionMatchesARowComputedByHand) {
  HandCase c;
  ASSERT_TRUE(RmsNormDefinition(c.args, Exec{}).ok());
  EXPECT_FLOAT_EQ(c.out[0], 1.2f);  // mean(x^2) = 25 / 4, so the scale is 1 / 2.5.
  EXPECT_FLOAT_EQ(c.out[1], 3.2f);
  EXPECT_EQ(c.out[2], 0.0f);
}

TEST(RmsNormTest, MatchesARowComputedByHand) {
  HandCase c;
  ASSERT_TRUE(RmsNorm(c.args, Exec{}).ok());
  EXPECT_FLOAT_EQ(c.out[0], 1.2f);
  EXPECT_FLOAT_EQ(c.out[1], 3.2f);
  EXPECT_EQ(c.out[3], 0.0f);
}

TEST(RmsNormTest, RoundsOnceToBf16InReferenceArithmetic) {
  HandCase c;
  c.args.arithmetic = Arithmetic::kReference;
  ASSERT_TRUE(RmsNorm(c.args, Exec{}).ok());
  EXPECT_EQ(c.out[0], 1.203125f);  // bf16 has steps of 2^-7 around 1.2 and of 2^-6 around 3.2.
  EXPECT_EQ(c.out[1], 3.203125f);
}

TEST(RmsNormTest, ReferenceIsTheRoundedMath) {
  for (const int64_t hidden : {512, 4096, 1000}) {
    const std::vector<float> x = OutlierValues(3, 4 * hidden);
    const std::vector<float> weight = NormalValues(4, hidden);
    std::vector<float> rounded = Normalised(x, hidden, weight, Arithmetic::kMath);
    for (float& value : rounded) value = RoundBf16(value);
    EXPECT_TRUE(SameBits(Normalised(x, hidden, weight, Arithmetic::kReference), rounded));
  }
}

TEST(RmsNormTest, PutsEpsilonUnderTheRoot) {
  HandCase c;
  c.args.epsilon = 2.75f;  // 25 / 4 + 11 / 4 = 9.
  ASSERT_TRUE(RmsNorm(c.args, Exec{}).ok());
  EXPECT_FLOAT_EQ(c.out[0], 1.0f);
}

TEST(RmsNormTest, GivesZerosForARowOfZeros) {
  const std::vector<float> zeros(64, 0.0f);
  EXPECT_TRUE(SameBits(Normalised(zeros, 64, {}, Arithmetic::kReference), zeros));
}

TEST(RmsNormTest, WithoutAWeightIsAWeightOfOnes) {
  for (const int64_t hidden : {512, 37}) {
    const std::vector<float> x = NormalValues(5, 3 * hidden);
    EXPECT_TRUE(
        SameBits(Normalised(x, hidden, {}, Arithmetic::kReference),
                 Normalised(x, hidden, std::vector<float>(hidden, 1.0f), Arithmetic::kReference)));
  }
}

TEST(RmsNormTest, MayWriteInPlace) {
  const int64_t hidden = 300;
  std::vector<float> x = NormalValues(6, 2 * hidden);
  const std::vector<float> weight = NormalValues(7, hidden);
  const std::vector<float> apart = Normalised(x, hidden, weight, Arithmetic::kReference);
  const MatrixView view = F32Matrix(x.data(), 2, hidden);
  ASSERT_TRUE(
      RmsNorm({.x = view, .weight = F32Vector(weight.data(), hidden), .out = view}, Exec{}).ok());
  EXPECT_TRUE(SameBits(x, apart));
}

TEST(RmsNormTest, WritesOnlyTheColumnsOfStridedRows) {
  const int64_t hidden = 21;
  const std::vector<float> weight = NormalValues(8, hidden);
  std::vector<float> wide = NormalValues(9, 3 * 64);
  std::vector<float> dense;
  for (int64_t t = 0; t < 3; ++t) {
    dense.insert(dense.end(), wide.begin() + t * 64, wide.begin() + t * 64 + hidden);
  }
  const std::vector<float> expected = Normalised(dense, hidden, weight, Arithmetic::kMath);
  const std::vector<float> before = wide;
  const MatrixView view = {wide.data(), DType::kF32, 3, hidden, 64};
  ASSERT_TRUE(RmsNorm({.x = view,
                       .weight = F32Vector(weight.data(), hidden),
                       .out = view,
                       .arithmetic = Arithmetic::kMath},
                      Exec{})
                  .ok());
  for (int64_t i = 0; i < 3 * 64; ++i) {
    const int64_t t = i / 64;
    const int64_t d = i % 64;
    EXPECT_EQ(wide[i], d < hidden ? expected[t * hidden + d] : before[i]) << t << ", " << d;
  }
}

TEST(RmsNormTest, ANanSpoilsItsOwnRowOnly) {
  std::vector<float> x = NormalValues(10, 3 * 64);
  const std::vector<float> clean = Normalised(x, 64, {}, Arithmetic::kReference);
  x[64 + 5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> out = Normalised(x, 64, {}, Arithmetic::kReference);
  for (int64_t i = 0; i < 3 * 64; ++i) {
    if (i / 64 == 1) {
      EXPECT_TRUE(std::isnan(out[i])) << i;
    } else {
      EXPECT_EQ(out[i], clean[i]) << i;
    }
  }
}

TEST(RmsNormTest, TakesNoTokens) {
  const RmsNormArgs args = {
      .x = F32Matrix(nullptr, 0, 16), .weight = {}, .out = F32Matrix(nullptr, 0, 16)};
  EXPECT_TRUE(RmsNorm(args, Exec{}).ok());
}

void ExpectRefused(const RmsNormArgs& args, const char* reason) {
  const absl::Status status = RmsNorm(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
  EXPECT_EQ(RmsNormDefinition(args, Exec{}), status);
}

TEST(RmsNormTest, RefusesAWeightOfAnotherHiddenSize) {
  HandCase c;
  c.args.weight.size = 3;
  ExpectRefused(c.args, "x has hidden 4, weight has 3");
}

TEST(RmsNormTest, RefusesAnOutputOfAnotherShape) {
  HandCase c;
  c.args.out.cols = 2;
  ExpectRefused(c.args, "x is [1, 4], out is [1, 2]");
}

TEST(RmsNormTest, RefusesTypesOtherThanF32) {
  HandCase c;
  c.args.x.dtype = DType::kBf16;
  ExpectRefused(c.args, "x must be f32");
  c.args.x.dtype = DType::kF32;
  c.args.weight.dtype = DType::kBf16;
  ExpectRefused(c.args, "weight must be f32");
}

TEST(RmsNormTest, RefusesRowsThatOverlap) {
  HandCase c;
  c.args.x = {c.x.data(), DType::kF32, 2, 2, 1};
  c.args.out = F32Matrix(c.out.data(), 2, 2);
  c.args.weight.size = 2;
  ExpectRefused(c.args, "row stride 1, hidden 2");
}

TEST(RmsNormTest, RefusesAHiddenSizeOfZeroAndANegativeEpsilon) {
  HandCase c;
  c.args.epsilon = -1e-6f;
  ExpectRefused(c.args, "epsilon");
  c.args.x.cols = 0;
  ExpectRefused(c.args, "hidden must be at least 1");
}

TEST(RmsNormTest, SaysWhenAnArchitectureHasNoVariant) {
  HandCase c;
  EXPECT_EQ(RmsNorm(c.args, Exec{.arch = 1}).code(), absl::StatusCode::kUnimplemented);
}

TEST(RmsNormTest, DependsNeitherOnTheBatchNorOnTheThreads) {
  const int64_t hidden = 4096;
  const int64_t rows = 17;
  const std::vector<float> x = NormalValues(11, rows * hidden);
  const std::vector<float> weight = NormalValues(12, hidden);
  const std::vector<float> alone = Normalised(x, hidden, weight, Arithmetic::kReference);
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    EXPECT_TRUE(SameBits(
        Normalised(x, hidden, weight, Arithmetic::kReference, Exec{.threads = &pool}), alone));
  }
  for (int64_t t = 0; t < rows; ++t) {
    const auto first = x.begin() + t * hidden;
    const std::vector<float> row(first, first + hidden);
    EXPECT_TRUE(SameBits(Normalised(row, hidden, weight, Arithmetic::kReference),
                         std::span(alone).subspan(t * hidden, hidden)));
  }
}

using RmsNormTargetTest = kernels::testing::SimdTargetTest;

TEST_P(RmsNormTargetTest, GivesTheBitsOfTheBestTarget) {
  for (const int64_t hidden : {1, 15, 16, 17, 512, 4096, 1000}) {
    const std::vector<float> x = OutlierValues(13, 3 * hidden);
    const std::vector<float> weight = NormalValues(14, hidden);
    for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
      const std::vector<float> here = Normalised(x, hidden, weight, arithmetic);
      kernels::testing::ForceTarget(0);
      const std::vector<float> best = Normalised(x, hidden, weight, arithmetic);
      kernels::testing::ForceTarget(GetParam());
      EXPECT_TRUE(SameBits(here, best)) << "hidden " << hidden;
    }
  }
}
ISTHMUS_INSTANTIATE_SIMD_TARGETS(RmsNormTargetTest);

// The definition's loops with f32 sums.
void Naive(const RmsNormArgs& args, float* out) {
  for (int64_t t = 0; t < args.x.rows; ++t) {
    float sum = 0.0f;
    for (int64_t d = 0; d < args.x.cols; ++d) sum += args.x.f32(t)[d] * args.x.f32(t)[d];
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(args.x.cols) + args.epsilon);
    for (int64_t d = 0; d < args.x.cols; ++d) {
      out[t * args.x.cols + d] = args.x.f32(t)[d] * scale * args.weight.f32()[d];
    }
  }
}

// Runs once per table entry: a new variant is tested by being listed.
class RmsNormVariantTest : public ::testing::TestWithParam<RmsNormVariant> {};

TEST_P(RmsNormVariantTest, StaysWithinItsBound) {
  const RmsNormVariant& variant = GetParam();
  for (const int64_t hidden : {7, 256, 512, 1000, 4096, 8192}) {
    const int64_t rows = 9;
    std::vector<float> x = OutlierValues(hidden, rows * hidden, 3.0f);
    const std::vector<float> weight = NormalValues(1, hidden);
    GuardedFloats out(rows * hidden);
    std::vector<float> exact(rows * hidden);
    std::vector<float> naive(rows * hidden);
    RmsNormArgs args = {.x = F32Matrix(x.data(), rows, hidden),
                        .weight = F32Vector(weight.data(), hidden),
                        .out = F32Matrix(out.data(), rows, hidden),
                        .arithmetic = Arithmetic::kMath};
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    args.out = F32Matrix(exact.data(), rows, hidden);
    ASSERT_TRUE(RmsNormDefinition(args, Exec{}).ok());
    Naive(args, naive.data());

    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    EXPECT_TRUE(WithinBound(out.values(), naive, exact, bound)) << "hidden " << hidden;
    EXPECT_TRUE(out.Intact());
  }
}

INSTANTIATE_TEST_SUITE_P(Table, RmsNormVariantTest,
                         ::testing::ValuesIn(kernels::testing::CpuVariants(RmsNormVariants())));

}  // namespace

}  // namespace isthmus::kernels
