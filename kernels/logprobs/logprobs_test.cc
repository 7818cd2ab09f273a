// SPDX-License-Identifier: Apache-2.0
// Log probabilities by hand, refusals, and the table against the definition.
#include "kernels/logprobs/logprobs.h"

#include <cmath>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/logprobs/logprobs_variants.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

void PrintTo(const LogprobsVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Operation = absl::StatusOr<TokenLogprobs> (*)(const LogprobsArgs&, const Exec&);

VectorView View(const std::vector<float>& logits) {
  return F32Vector(logits.data(), static_cast<int64_t>(logits.size()));
}

class LogprobsTest : public ::testing::TestWithParam<Operation> {
 protected:
  TokenLogprobs Of(const std::vector<float>& logits, int32_t chosen, int32_t num_top) {
    const absl::StatusOr<TokenLogprobs> result =
        GetParam()({.logits = View(logits), .chosen = chosen, .num_top = num_top}, Exec{});
    EXPECT_TRUE(result.ok()) << result.status();
    return result.value_or(TokenLogprobs());
  }
};

std::vector<int32_t> Ids(const TokenLogprobs& result) {
  std::vector<int32_t> ids;
  for (const TokenLogprob& entry : result.top) ids.push_back(entry.id);
  return ids;
}

TEST_P(LogprobsTest, AreThoseOfTheSoftmax) {
  // Probabilities 1/8, 1/2, 1/4, 1/8.
  const float ln2 = 0.69314718f;
  const TokenLogprobs result = Of({-2 * ln2, 0.0f, -ln2, -2 * ln2}, 2, 3);
  EXPECT_EQ(result.chosen.id, 2);
  EXPECT_FLOAT_EQ(result.chosen.logprob, -2 * ln2);
  EXPECT_EQ(result.rank, 2);
  EXPECT_EQ(Ids(result), (std::vector<int32_t>{1, 2, 0}));
  EXPECT_FLOAT_EQ(result.top[0].logprob, -ln2);
  EXPECT_FLOAT_EQ(result.top[2].logprob, -3 * ln2);
}

TEST_P(LogprobsTest, PutTheSmallerIdFirstAmongEquals) {
  const TokenLogprobs result = Of({1.0f, 2.0f, 1.0f, 2.0f, -0.0f, 0.0f}, 3, 6);
  EXPECT_EQ(Ids(result), (std::vector<int32_t>{1, 3, 0, 2, 4, 5}));
  EXPECT_EQ(result.rank, 1);  // Nobody is likelier than the first of equals.
  EXPECT_EQ(Ids(Of({1.0f, 2.0f, 1.0f, 2.0f}, 3, 1)), std::vector<int32_t>{1});
}

TEST_P(LogprobsTest, TakeWhatIsNotFiniteForImpossible) {
  const TokenLogprobs result = Of({kNan, 1.0f, kInfinity, -kInfinity, 1.0f}, 0, 5);
  EXPECT_EQ(result.chosen.logprob, -kInfinity);
  EXPECT_EQ(result.rank, 3);
  EXPECT_EQ(Ids(result), (std::vector<int32_t>{1, 4}));
  EXPECT_FLOAT_EQ(result.top[0].logprob, -0.69314718f);
  EXPECT_TRUE(Of({kNan, kNan}, 1, 2).top.empty());
}

TEST_P(LogprobsTest, NeitherOverflowNorVanish) {
  EXPECT_FLOAT_EQ(Of({3e38f, 3e38f}, 0, 0).chosen.logprob, -0.69314718f);
  EXPECT_FLOAT_EQ(Of({-3e38f, 0.0f}, 1, 0).chosen.logprob, 0.0f);
  EXPECT_FLOAT_EQ(Of({0.0f, 100.0f}, 0, 0).chosen.logprob, -100.0f);
}

TEST_P(LogprobsTest, RefuseWhatBreaksTheContract) {
  const std::vector<float> logits = {1.0f, 2.0f};
  const auto refusal = [&](LogprobsArgs args) {
    const absl::Status status = GetParam()(args, Exec{}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal({}), HasSubstr("there are 0 logits"));
  EXPECT_THAT(refusal({.logits = View(logits), .chosen = 2}), HasSubstr("chosen is 2"));
  EXPECT_THAT(refusal({.logits = View(logits), .chosen = -1}), HasSubstr("chosen is -1"));
  EXPECT_THAT(refusal({.logits = View(logits), .num_top = -1}), HasSubstr("num_top is -1"));
}

std::string OperationName(const ::testing::TestParamInfo<Operation>& param) {
  return param.param == Logprobs ? "Logprobs" : "Definition";
}
INSTANTIATE_TEST_SUITE_P(Operation, LogprobsTest, ::testing::Values(Logprobs, LogprobsDefinition),
                         OperationName);

// Runs once per table entry: a new variant is tested by being listed.
class LogprobsVariantTest : public ::testing::TestWithParam<LogprobsVariant> {};

TEST_P(LogprobsVariantTest, HasTheBitsOfTheDefinition) {
  const LogprobsVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  for (const int64_t vocab : {1, 7, 1000, 1003, 20000}) {
    // Of 1003 the masses reach down to nothing at all.
    const float deviation = vocab == 1003 ? 400.0f : 3.0f;
    std::vector<float> logits =
        testing::NormalValues(static_cast<uint64_t>(vocab), vocab, deviation);
    for (int64_t id = 0; id < vocab; ++id) {
      if (id % 3 == 0) logits[static_cast<size_t>(id)] = std::round(logits[id]);
      if (id % 11 == 5) logits[static_cast<size_t>(id)] = id % 2 == 0 ? kNan : -kInfinity;
    }
    for (int32_t num_top : {0, 1, 5, 20}) {
      for (int32_t chosen = 0; chosen < vocab; chosen += 1 + static_cast<int32_t>(vocab) / 9) {
        const LogprobsArgs args = {.logits = View(logits), .chosen = chosen, .num_top = num_top};
        const absl::StatusOr<TokenLogprobs> result = variant.launch(args, Exec{});
        const absl::StatusOr<TokenLogprobs> expected = LogprobsDefinition(args, Exec{});
        ASSERT_TRUE(result.ok() && expected.ok());
        ASSERT_EQ(*result, *expected) << vocab << " logits, chosen " << chosen;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, LogprobsVariantTest,
                         ::testing::ValuesIn(LogprobsVariants().begin(), LogprobsVariants().end()));

}  // namespace
}  // namespace isthmus::kernels
