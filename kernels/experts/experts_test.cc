// SPDX-License-Identifier: Apache-2.0
// By hand (clamp, order, scaling once), refusals, the trusted path within its bound at the real
// shapes, and bits that do not depend on the batch, the threads or the SIMD target.
#include "kernels/experts/experts.h"

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/workspace.h"
#include "kernels/experts/experts_cases.h"
#include "kernels/experts/experts_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;

// hidden 1, intermediate 1: y = w2 * silu(min(w1 x, limit)) * clamp(w3 x) * weight.
OwnedExpert ScalarExpert(float w1, float w3, float w2) {
  return {testing::WeightFrom(WeightFormat::kF32, 1, 1, {w1}),
          testing::WeightFrom(WeightFormat::kF32, 1, 1, {w3}),
          testing::WeightFrom(WeightFormat::kF32, 1, 1, {w2})};
}

double Silu(double x) { return x / (1.0 + std::exp(-x)); }

// ---- By hand. Both the definition and the CPU path.

class ExpertsByHandTest
    : public ::testing::TestWithParam<absl::Status (*)(const ExpertsArgs&, const Exec&)> {
 protected:
  // One token with value x through `experts` with the given ids and weights, in math.
  float Run(float x, const std::vector<ExpertWeights>& experts, std::vector<int32_t> ids,
            std::vector<float> weights, const ExpertWeights* shared = nullptr) {
    float out = -1.0f;
    ExpertsArgs args;
    args.x = F32Matrix(&x, 1, 1);
    args.ids = ids.data();
    args.weights = weights.data();
    args.k = static_cast<int64_t>(ids.size());
    args.experts = experts;
    args.shared = shared;
    args.limit = limit_;
    args.shared_limit = shared_limit_;
    args.out = F32Matrix(&out, 1, 1);
    args.routed = F32Matrix(&routed_, 1, 1);
    args.arithmetic = Arithmetic::kMath;
    EXPECT_TRUE(GetParam()(args, Exec{}).ok());
    return out;
  }
  float limit_ = 10.0f;
  float shared_limit_ = 10.0f;
  float routed_ = 0.0f;
};
INSTANTIATE_TEST_SUITE_P(Both, ExpertsByHandTest, ::testing::Values(&Experts, &ExpertsDefinition));

// The gate is cut from above only, the up projection from both sides.
TEST_P(ExpertsByHandTest, ClampsTheGateOnOneSideAndUpOnBoth) {
  const OwnedExpert e = ScalarExpert(1.0f, 2.0f, 1.0f);
  const std::vector<ExpertWeights> experts = {e.weights()};
  EXPECT_NEAR(Run(3.0f, experts, {0}, {1.0f}), Silu(3.0) * 6.0, 1e-5);
  EXPECT_NEAR(Run(20.0f, experts, {0}, {1.0f}), Silu(10.0) * 10.0, 1e-4);
  EXPECT_NEAR(Run(-20.0f, experts, {0}, {1.0f}), Silu(-20.0) * -10.0, 1e-9);
  limit_ = 0.0f;  // No clamp.
  EXPECT_NEAR(Run(20.0f, experts, {0}, {1.0f}), Silu(20.0) * 40.0, 1e-3);
}

TEST_P(ExpertsByHandTest, ClampsTheSharedExpertWithItsOwnLimit) {
  const OwnedExpert e = ScalarExpert(1.0f, 2.0f, 1.0f);
  const ExpertWeights shared = e.weights();
  EXPECT_NEAR(Run(20.0f, {}, {}, {}, &shared), Silu(10.0) * 10.0, 1e-4);
  shared_limit_ = 0.0f;
  EXPECT_NEAR(Run(20.0f, {}, {}, {}, &shared), Silu(20.0) * 40.0, 1e-3);
}

// The weight carries the route scale: it must come in once, and not at all for the shared expert.
TEST_P(ExpertsByHandTest, AppliesTheWeightExactlyOnce) {
  const OwnedExpert a = ScalarExpert(1.0f, 1.0f, 1.0f);
  const OwnedExpert b = ScalarExpert(1.0f, 1.0f, 10.0f);
  const OwnedExpert s = ScalarExpert(1.0f, 1.0f, 100.0f);
  const ExpertWeights shared = s.weights();
  const std::vector<ExpertWeights> experts = {a.weights(), b.weights()};
  const double unit = Silu(1.0);
  EXPECT_NEAR(Run(1.0f, experts, {0, 1}, {1.5f, 0.25f}, &shared),
              unit * (1.5 + 10.0 * 0.25 + 100.0), 1e-4);
  EXPECT_NEAR(routed_, unit * (1.5 + 10.0 * 0.25), 1e-5);
}

// In f32, 2^26 + 1 - 2^26 is 0 in ascending order of ids, and 1 in the order in which the router
// named the experts. The definition adds in f64 and sees 1 either way.
TEST_P(ExpertsByHandTest, AddsInAscendingExpertId) {
  const bool f64 = GetParam() == &ExpertsDefinition;
  const float unit = static_cast<float>(Silu(1.0));
  const float big = 0x1p26f;
  const OwnedExpert a = ScalarExpert(1.0f, 1.0f, big);
  const OwnedExpert b = ScalarExpert(1.0f, 1.0f, 1.0f);
  const OwnedExpert c = ScalarExpert(1.0f, 1.0f, -big);
  const std::vector<ExpertWeights> experts = {a.weights(), b.weights(), c.weights()};
  const std::vector<ExpertWeights> swapped = {a.weights(), c.weights(), b.weights()};
  const std::vector<float> ones = {1.0f, 1.0f, 1.0f};
  EXPECT_FLOAT_EQ(Run(1.0f, experts, {0, 1, 2}, ones), f64 ? unit : 0.0f);
  EXPECT_FLOAT_EQ(Run(1.0f, experts, {2, 0, 1}, ones), f64 ? unit : 0.0f);
  EXPECT_FLOAT_EQ(Run(1.0f, swapped, {2, 0, 1}, ones), unit);
}

TEST_P(ExpertsByHandTest, RoundsWhereTheReferenceDoes) {
  // 257 is no bf16: g = 256 (limit off), so silu(g) = 256; u = 1, h = 256 * 257 / 256 = 257 -> 256.
  float x = 1.0f;
  float weight = 257.0f / 256.0f;
  const int32_t id = 0;
  const OwnedExpert e = ScalarExpert(257.0f, 1.0f, 257.0f / 256.0f);
  const std::vector<ExpertWeights> experts = {e.weights()};
  float out = 0.0f;
  ExpertsArgs args;
  args.x = F32Matrix(&x, 1, 1);
  args.ids = &id;
  args.weights = &weight;
  args.k = 1;
  args.experts = experts;
  args.limit = 0.0f;
  args.out = F32Matrix(&out, 1, 1);
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_EQ(out, 256.0f);  // y = 257 -> 256.
  args.arithmetic = Arithmetic::kMath;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_NEAR(out, 257.0f * weight * weight, 1e-3f);
}

// ---- Refusals.

class ExpertsRefusalTest : public ::testing::Test {
 protected:
  ExpertsRefusalTest()
      : a_(RandomExpert(1, WeightFormat::kMxfp4, 64, 32)),
        b_(RandomExpert(4, WeightFormat::kMxfp4, 64, 32)),
        experts_{a_.weights(), b_.weights()} {
    args_.x = F32Matrix(x_, 2, 64);
    args_.ids = ids_;
    args_.weights = weights_;
    args_.k = 2;
    args_.experts = experts_;
    args_.out = F32Matrix(out_, 2, 64);
  }
  void ExpectRefused(const std::string& part) {
    const absl::Status status = Experts(args_, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  }
  OwnedExpert a_, b_;
  std::vector<ExpertWeights> experts_;
  float x_[128] = {};
  float out_[128] = {};
  int32_t ids_[4] = {0, 1, 1, 0};
  float weights_[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  ExpertsArgs args_;
};

TEST_F(ExpertsRefusalTest, AcceptsTheUnchangedArguments) {
  EXPECT_TRUE(Experts(args_, Exec{}).ok());
}
TEST_F(ExpertsRefusalTest, AnIdOutOfRange) {
  ids_[2] = 2;
  ExpectRefused("token 1 names expert 2 of 2");
  ids_[2] = -1;
  ExpectRefused("token 1 names expert -1 of 2");
}
TEST_F(ExpertsRefusalTest, AnExpertNamedTwice) {
  ids_[3] = 1;
  ExpectRefused("token 1 names expert 1 as choice 0 and 1");
}
TEST_F(ExpertsRefusalTest, AnotherHidden) {
  args_.x = F32Matrix(x_, 2, 32);
  args_.out = F32Matrix(out_, 2, 32);
  ExpectRefused("w1 is [32, 64], expected [32, 32]");
}
TEST_F(ExpertsRefusalTest, AnotherOutput) {
  args_.out = F32Matrix(out_, 1, 64);
  ExpectRefused("out is [1, 64]");
}
TEST_F(ExpertsRefusalTest, AnotherIntermediate) {
  experts_[1].w2.cols = 64;
  ExpectRefused("w2 is [64, 64], expected [64, 32]");
}
TEST_F(ExpertsRefusalTest, MoreChoicesThanExperts) {
  args_.k = 3;
  ExpectRefused("k is 3 of 2 experts");
}
TEST_F(ExpertsRefusalTest, NoIds) {
  args_.ids = nullptr;
  ExpectRefused("without ids");
}

// ---- Bounds and bits.

class ExpertsVariantTest : public ::testing::TestWithParam<ExpertsVariant> {
 protected:
  void ExpectWithinBound(ExpertsCase& c, Arithmetic arithmetic) {
    const ExpertsVariant& variant = GetParam();
    const int64_t n = c.tokens_ * c.hidden_;
    testing::GuardedFloats out(n);
    testing::GuardedFloats routed(n);
    std::vector<float> exact(static_cast<size_t>(n));
    ThreadPool threads(2);
    Exec exec;
    exec.threads = &threads;
    ASSERT_TRUE(variant.launch(c.Args(arithmetic, out.data(), routed.data()), exec).ok());
    ExpertsArgs definition = c.Args(arithmetic, exact.data(), nullptr);
    ASSERT_TRUE(ExpertsDefinition(definition, Exec{}).ok());
    EXPECT_TRUE(out.Intact());
    EXPECT_TRUE(routed.Intact());
    const std::vector<float> naive = NaiveExperts(definition);
    // Reference: bf16 and e4m3 flips inside dominate, and their number is a matter of luck.
    const NumericBound flips = {NumericClass::kReordered, 2.0, 2e-5};
    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    EXPECT_TRUE(testing::WithinBound(out.values(), naive, exact,
                                     arithmetic == Arithmetic::kMath ? bound : flips));
  }
};
INSTANTIATE_TEST_SUITE_P(Table, ExpertsVariantTest,
                         ::testing::ValuesIn(testing::CpuVariants(ExpertsVariants())));

TEST_P(ExpertsVariantTest, StaysWithinItsBoundInMath) {
  ExpertsCase c(WeightFormat::kNvfp4, 5, 256, 96, 8, 3, true);
  ExpectWithinBound(c, Arithmetic::kMath);
}
TEST_P(ExpertsVariantTest, StaysWithinItsBoundInReference) {
  ExpertsCase c(WeightFormat::kMxfp4, 5, 256, 128, 8, 3, true);
  ExpectWithinBound(c, Arithmetic::kReference);
}
TEST_P(ExpertsVariantTest, StaysWithinItsBoundAtTheRealHiddenInMath) {
  ExpertsCase c(WeightFormat::kNvfp4, 1, 4096, 256, 2, 1, true);
  ExpectWithinBound(c, Arithmetic::kMath);
}
TEST_P(ExpertsVariantTest, StaysWithinItsBoundAtTheRealShapeInReference) {
  ExpertsCase c(WeightFormat::kNvfp4, 1, 4096, 2048, 2, 1, true);
  ExpectWithinBound(c, Arithmetic::kReference);
}

std::vector<float> RunExperts(ExpertsCase& c, const Exec& exec, int64_t first, int64_t count) {
  std::vector<float> out(static_cast<size_t>(count * c.hidden_));
  ExpertsArgs args = c.Args(Arithmetic::kReference, nullptr, nullptr);
  args.x = args.x.Rows(first, count);
  args.ids += first * c.k_;
  args.weights += first * c.k_;
  args.out = F32Matrix(out.data(), count, c.hidden_);
  EXPECT_TRUE(Experts(args, exec).ok());
  return out;
}

TEST(ExpertsTest, GivesATokenTheSameBitsInEveryBatch) {
  ExpertsCase c(WeightFormat::kMxfp4, 23, 128, 64, 12, 4, true);
  ThreadPool threads(3);
  Workspace workspace;
  Exec exec;
  exec.threads = &threads;
  exec.workspace = &workspace;
  const std::vector<float> all = RunExperts(c, exec, 0, 23);
  std::vector<float> parts;
  for (const auto& [first, count] : {std::pair{0, 1}, {1, 2}, {3, 7}, {10, 13}}) {
    const std::vector<float> part = RunExperts(c, Exec{}, first, count);
    parts.insert(parts.end(), part.begin(), part.end());
  }
  EXPECT_TRUE(SameBits(parts, all));
}

TEST(ExpertsTest, GivesTheSameBitsFromRowsAndOnEveryTarget) {
  ExpertsCase packed(WeightFormat::kNvfp4, 9, 128, 64, 6, 2, true);
  ExpertsCase rows(WeightFormat::kNvfp4, 9, 128, 64, 6, 2, false);
  const std::vector<float> expected = RunExperts(packed, Exec{}, 0, 9);
  const int ran = testing::ForEachTarget([&] {
    EXPECT_TRUE(SameBits(RunExperts(packed, Exec{}, 0, 9), expected));
    EXPECT_TRUE(SameBits(RunExperts(rows, Exec{}, 0, 9), expected));
  });
  EXPECT_GE(ran, 1);
}

TEST(ExpertsTest, MayWriteOverItsInput) {
  ExpertsCase c(WeightFormat::kMxfp4, 6, 128, 64, 6, 2, true);
  const std::vector<float> expected = RunExperts(c, Exec{}, 0, 6);
  ExpertsArgs args = c.Args(Arithmetic::kReference, c.x.data(), nullptr);
  ASSERT_TRUE(Experts(args, Exec{}).ok());
  EXPECT_TRUE(SameBits(c.x, expected));
}

// Experts that no token names may be absent: a worker loads what it serves.
TEST(ExpertsTest, NeverTouchesAnExpertWithoutTokens) {
  ExpertsCase c(WeightFormat::kMxfp4, 4, 128, 64, 5, 1, true);
  for (int32_t& id : c.ids) id = 2;
  const std::vector<float> expected = RunExperts(c, Exec{}, 0, 4);
  for (size_t e = 0; e < 5; ++e) {
    if (e != 2) c.experts[e] = ExpertWeights{};
  }
  EXPECT_TRUE(SameBits(RunExperts(c, Exec{}, 0, 4), expected));
}

TEST(ExpertsTest, TakesAnEmptyBatch) {
  ExpertsCase c(WeightFormat::kMxfp4, 1, 128, 64, 5, 1, true);
  EXPECT_TRUE(RunExperts(c, Exec{}, 0, 0).empty());
}

TEST(ExpertsTest, KeepsNanToItsToken) {
  ExpertsCase c(WeightFormat::kMxfp4, 3, 128, 64, 5, 2, true);
  c.x[128 + 5] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> out = RunExperts(c, Exec{}, 0, 3);
  for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(std::isnan(out[i]), i / 128 == 1) << i;
}

}  // namespace
}  // namespace isthmus::kernels
