// SPDX-License-Identifier: Apache-2.0
// The gate and its definition by hand, by unit vectors and against each other.
#include "kernels/gate/gate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gate/gate_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const GateVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using kernels::testing::NormalValues;
using kernels::testing::SameBits;
using kernels::testing::WithinBound;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Operation = absl::Status (*)(const GateArgs&, const Exec&);

// A gate and the memory of its inputs and outputs.
struct Case {
  Case(std::vector<float> z, int64_t experts, int64_t chosen)
      : logits(std::move(z)), bias(experts, 0.0f), k(chosen) {
    const auto rows = static_cast<int64_t>(logits.size()) / experts;
    scores.resize(logits.size());
    ids.resize(rows * k);
    weights.resize(rows * k);
  }

  GateArgs Args() {
    const auto experts = static_cast<int64_t>(bias.size());
    const auto rows = static_cast<int64_t>(logits.size()) / experts;
    const bool hash = !hash_ids.empty();
    return {.logits = F32Matrix(logits.data(), rows, experts),
            .scores = F32Matrix(scores.data(), rows, experts),
            .bias = hash ? VectorView{} : F32Vector(bias.data(), experts),
            .hash_ids = hash_ids,
            .token_ids = token_ids,
            .k = k,
            .route_scale = route_scale,
            .ids = ids.data(),
            .weights = weights.data()};
  }
  void Run(Operation operation = Gate, const Exec& exec = {}) {
    const absl::Status status = operation(Args(), exec);
    ASSERT_TRUE(status.ok()) << status;
  }

  std::vector<float> logits, scores, bias;
  std::vector<int64_t> hash_ids;
  std::vector<int32_t> token_ids;
  int64_t k;
  float route_scale = 1.0f;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

class GateFormulaTest : public ::testing::TestWithParam<Operation> {};

TEST_P(GateFormulaTest, ScoresAreTheValuesOfTheSpecification) {
  Case c({-30.0f, -20.0f, 0.0f, 20.0f}, 4, 1);
  c.Run(GetParam());
  EXPECT_FLOAT_EQ(c.scores[0], 3.0590232e-7f);
  EXPECT_FLOAT_EQ(c.scores[1], 4.5399930e-5f);
  EXPECT_FLOAT_EQ(c.scores[2], 0.83255461f);
  EXPECT_FLOAT_EQ(c.scores[3], 4.47213595f);
}

TEST_P(GateFormulaTest, TakesTheLargestAndWeighsThemByTheirShare) {
  // sqrt(softplus(z)) of 0 is 0.83255461; two equal scores share the weight.
  Case c({0.0f, -5.0f, 0.0f, -6.0f}, 4, 2);
  c.route_scale = 1.5f;
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(0, 2));
  EXPECT_FLOAT_EQ(c.weights[0], 0.75f);
  EXPECT_FLOAT_EQ(c.weights[1], 0.75f);
}

TEST_P(GateFormulaTest, ReturnsIdsInOrderOfTheirSum) {
  Case c({1.0f, 3.0f, 2.0f, 4.0f}, 4, 3);
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(3, 1, 2));
}

TEST_P(GateFormulaTest, UsesTheBiasForTheChoiceOnly) {
  Case c({0.0f, 0.0f, 0.0f}, 3, 2);
  c.bias = {0.0f, -1.0f, 1.0f};
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(2, 0));
  EXPECT_FLOAT_EQ(c.weights[0], 0.5f);
  EXPECT_FLOAT_EQ(c.weights[1], 0.5f);
  EXPECT_FLOAT_EQ(c.scores[2], 0.83255461f);
}

TEST_P(GateFormulaTest, PrefersTheSmallerIdAmongEquals) {
  Case c(std::vector<float>(16, 1.25f), 16, 6);
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(0, 1, 2, 3, 4, 5));
}

// Specification 10.4: log(1 + exp(z)) loses these scores, and six of them divide 0 by 0.
TEST_P(GateFormulaTest, KeepsVeryNegativeScoresApartFromZero) {
  Case c({-80.0f, -60.0f, -40.0f, -70.0f}, 4, 2);
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(2, 1));
  EXPECT_NEAR(c.scores[2] / std::exp(-20.0), 1.0, 1e-6);
  EXPECT_NEAR(c.weights[0] + c.weights[1], 1.0, 1e-6);
}

TEST_P(GateFormulaTest, DividesASumOfZeroByASmallNumberInstead) {
  Case c(std::vector<float>(4, -kInfinity), 4, 2);
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(0, 1));
  EXPECT_THAT(c.weights, ElementsAre(0.0f, 0.0f));
}

TEST_P(GateFormulaTest, SortsNanLast) {
  Case c({kNan, -50.0f, kNan, 2.0f}, 4, 3);
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(3, 1, 0));
  EXPECT_TRUE(std::isnan(c.weights[0]));
}

TEST_P(GateFormulaTest, ReadsTheTableInHashLayers) {
  Case c({5.0f, 0.0f, 0.0f, -9.0f, 5.0f, 0.0f, 0.0f, -9.0f}, 4, 2);
  c.hash_ids = {0, 1, 3, 2, 2, 1};
  c.token_ids = {2, 1};
  c.Run(GetParam());
  EXPECT_THAT(c.ids, ElementsAre(2, 1, 3, 2));  // In the order of the table, not of the scores.
  EXPECT_FLOAT_EQ(c.weights[0], 0.5f);
  EXPECT_FLOAT_EQ(c.weights[2], c.scores[7] / (c.scores[7] + c.scores[6]));
}

TEST_P(GateFormulaTest, MayWriteScoresOverTheLogits) {
  Case apart(NormalValues(1, 3 * 32), 32, 6);
  apart.Run(GetParam());
  Case c(NormalValues(1, 3 * 32), 32, 6);
  GateArgs args = c.Args();
  args.scores = args.logits;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_TRUE(SameBits(c.logits, apart.scores));
  EXPECT_EQ(c.ids, apart.ids);
  EXPECT_TRUE(SameBits(c.weights, apart.weights));
}

TEST_P(GateFormulaTest, MatchesTheUnitVectors) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_router.safetensors");
  const std::vector<int64_t> dims = file.dims();
  const int64_t tokens = dims[0];
  const int64_t hidden = dims[1];
  const int64_t experts = dims[2];
  const std::vector<float> x = file.at("x").F32();
  const std::vector<float> w = file.at("gate_w").F32();
  std::vector<float> logits;
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts; ++e) {
      double sum = 0.0;
      for (int64_t k = 0; k < hidden; ++k) sum += double{x[t * hidden + k]} * w[e * hidden + k];
      logits.push_back(static_cast<float>(sum));
    }
  }
  Case c(logits, experts, dims[3]);
  c.bias = file.at("bias").F32();
  c.route_scale = file.at("route_scale").F32()[0];
  c.Run(GetParam());
  const std::vector<int64_t> ids = file.at("indices_ref").Ints();
  const std::vector<float> weights = file.at("weights_ref").F32();
  ASSERT_EQ(c.ids.size(), ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    EXPECT_EQ(c.ids[i], ids[i]) << i;
    EXPECT_NEAR(c.weights[i], weights[i], 1e-6) << i;
  }
}

std::string OperationName(const ::testing::TestParamInfo<Operation>& param) {
  return param.param == Gate ? "Gate" : "Definition";
}
INSTANTIATE_TEST_SUITE_P(Operation, GateFormulaTest, ::testing::Values(Gate, GateDefinition),
                         OperationName);

// ---- Refusals.

void ExpectRefused(const GateArgs& args, const char* reason) {
  const absl::Status status = Gate(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
  EXPECT_EQ(GateDefinition(args, Exec{}), status);
}

TEST(GateTest, RefusesATokenOutsideTheTable) {
  Case c(std::vector<float>(8, 0.0f), 4, 2);
  c.hash_ids = {0, 1, 2, 3};
  c.token_ids = {1, 2};
  ExpectRefused(c.Args(), "token id 2 of token 1 is outside the table of 2");
  c.token_ids = {1, -1};
  ExpectRefused(c.Args(), "token id -1 of token 1");
}

TEST(GateTest, RefusesATableEntryThatIsNoExpert) {
  Case c(std::vector<float>(4, 0.0f), 4, 2);
  c.token_ids = {0};
  c.hash_ids = {0, 4};
  ExpectRefused(c.Args(), "names expert 4 of 4");
  c.hash_ids = {-1, 0};
  ExpectRefused(c.Args(), "names expert -1 of 4");
}

TEST(GateTest, RefusesATableThatDoesNotFit) {
  Case c(std::vector<float>(4, 0.0f), 4, 2);
  c.token_ids = {0};
  c.hash_ids = {0, 1, 2};
  ExpectRefused(c.Args(), "hash_ids has 3 entries, no multiple of k 2");
  c.hash_ids = {0, 1};
  c.token_ids = {0, 0};
  ExpectRefused(c.Args(), "logits has 1 tokens, token_ids 2");
}

TEST(GateTest, RefusesABiasInHashLayersAndItsAbsenceElsewhere) {
  Case c(std::vector<float>(4, 0.0f), 4, 2);
  GateArgs args = c.Args();
  args.bias = {};
  ExpectRefused(args, "logits has 4 experts, bias 0");
  c.hash_ids = {0, 1};
  c.token_ids = {0};
  args = c.Args();
  args.bias = F32Vector(c.bias.data(), 4);
  ExpectRefused(args, "hash layers have no bias");
}

TEST(GateTest, RefusesAKOutOfRange) {
  Case c(std::vector<float>(128, 0.0f), 128, 6);
  GateArgs args = c.Args();
  for (const int64_t k : {int64_t{0}, int64_t{-1}, kMaxGateK + 1}) {
    args.k = k;
    ExpectRefused(args, "k must be in [1, 64]");
  }
  Case few(std::vector<float>(4, 0.0f), 4, 2);
  args = few.Args();
  args.k = 5;
  ExpectRefused(args, "k is 5, experts 4");
}

TEST(GateTest, RefusesScoresOfAnotherShapeAndMissingOutputs) {
  Case c(std::vector<float>(8, 0.0f), 4, 2);
  GateArgs args = c.Args();
  args.scores.rows = 1;
  ExpectRefused(args, "logits is [2, 4], scores is [1, 4]");
  args = c.Args();
  args.ids = nullptr;
  ExpectRefused(args, "ids or weights is null");
  args = c.Args();
  args.logits.dtype = DType::kBf16;
  ExpectRefused(args, "logits must be f32");
}

TEST(GateTest, SaysWhenAnArchitectureHasNoVariant) {
  Case c(std::vector<float>(4, 0.0f), 4, 2);
  EXPECT_EQ(Gate(c.Args(), Exec{.arch = 1}).code(), absl::StatusCode::kUnimplemented);
}

// ---- Invariance and bounds at the real shape: 256 experts, top 6.

Case RealCase(uint64_t seed, int64_t tokens) {
  Case c(NormalValues(seed, tokens * 256, 4.0f), 256, 6);
  c.bias = NormalValues(seed + 1, 256, 0.3f);
  c.route_scale = 1.5f;
  return c;
}

TEST(GateTest, DependsNeitherOnTheBatchNorOnTheThreads) {
  Case alone = RealCase(2, 33);
  alone.Run();
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    Case c = RealCase(2, 33);
    c.Run(Gate, Exec{.threads = &pool});
    EXPECT_EQ(c.ids, alone.ids);
    EXPECT_TRUE(SameBits(c.weights, alone.weights));
    EXPECT_TRUE(SameBits(c.scores, alone.scores));
  }
  for (int64_t t = 0; t < 33; ++t) {
    const auto first = alone.logits.begin() + t * 256;
    Case row(std::vector<float>(first, first + 256), 256, 6);
    row.bias = alone.bias;
    row.route_scale = 1.5f;
    row.Run();
    EXPECT_TRUE(SameBits(row.weights, std::span(alone.weights).subspan(t * 6, 6))) << t;
    EXPECT_TRUE(std::equal(row.ids.begin(), row.ids.end(), alone.ids.begin() + t * 6)) << t;
  }
}

// Runs once per table entry: a new variant is tested by being listed.
class GateVariantTest : public ::testing::TestWithParam<GateVariant> {};

TEST_P(GateVariantTest, ChoosesTheSameExpertsAndStaysWithinItsBound) {
  const GateVariant& variant = GetParam();
  Case exact = RealCase(3, 500);
  exact.Run(GateDefinition);
  Case c = RealCase(3, 500);
  c.Run(variant.launch);
  EXPECT_EQ(c.ids, exact.ids);

  // The definition's loops with f32 sums of f32 scores.
  std::vector<float> naive(c.weights.size());
  for (size_t t = 0; t < 500; ++t) {
    float sum = 0.0f;
    for (size_t i = 0; i < 6; ++i) sum += exact.scores[t * 256 + exact.ids[t * 6 + i]];
    for (size_t i = 0; i < 6; ++i) {
      naive[t * 6 + i] = exact.scores[t * 256 + exact.ids[t * 6 + i]] / sum * 1.5f;
    }
  }
  const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
  EXPECT_TRUE(WithinBound(c.weights, naive, exact.weights, bound));
  EXPECT_TRUE(WithinBound(c.scores, exact.scores, exact.scores, bound));
}

INSTANTIATE_TEST_SUITE_P(Table, GateVariantTest,
                         ::testing::ValuesIn(kernels::testing::CpuVariants(GateVariants())));

}  // namespace
}  // namespace isthmus::kernels
