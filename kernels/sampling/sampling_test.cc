// SPDX-License-Identifier: Apache-2.0
// Sampling and its definition by hand and against each other; the uniform numbers; refusals.
#include "kernels/sampling/sampling.h"

#include <cmath>
#include <limits>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/workspace.h"
#include "kernels/sampling/sampling_variants.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

void PrintTo(const SamplingVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using kernels::testing::NormalValues;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

using Operation = absl::StatusOr<int32_t> (*)(const SamplingArgs&, const Exec&);

VectorView View(const std::vector<float>& logits) {
  return F32Vector(logits.data(), static_cast<int64_t>(logits.size()));
}

// The token, or -1 after a failure.
int32_t Token(Operation operation, const std::vector<float>& logits, SamplingArgs args) {
  // One for all draws: a workspace of its own per call is a megabyte that sanitizers poison.
  static Workspace workspace;
  args.logits = View(logits);
  const absl::StatusOr<int32_t> token = operation(args, Exec{.workspace = &workspace});
  EXPECT_TRUE(token.ok()) << token.status();
  return token.ok() ? *token : -1;
}

SamplingArgs Drawn(float temperature, float top_p = 1.0f, int32_t top_k = 0) {
  return {.logits = {}, .temperature = temperature, .top_p = top_p, .top_k = top_k};
}

// How often each token is drawn with counters [0, draws).
std::map<int32_t, int> Histogram(Operation operation, const std::vector<float>& logits,
                                 SamplingArgs args, int draws) {
  std::map<int32_t, int> counts;
  for (int i = 0; i < draws; ++i) {
    args.counter = static_cast<uint64_t>(i);
    ++counts[Token(operation, logits, args)];
  }
  return counts;
}

std::set<int32_t> Support(Operation operation, const std::vector<float>& logits,
                          const SamplingArgs& args) {
  std::set<int32_t> tokens;
  for (const auto& [token, count] : Histogram(operation, logits, args, 400)) tokens.insert(token);
  return tokens;
}

class SampleTest : public ::testing::TestWithParam<Operation> {};

TEST_P(SampleTest, IsTheLargestWithoutTemperature) {
  EXPECT_EQ(Token(GetParam(), {0.5f, 3.0f, -1.0f}, Drawn(0.0f)), 1);
  EXPECT_EQ(Token(GetParam(), {-7.0f}, Drawn(0.0f)), 0);
}

TEST_P(SampleTest, PrefersTheSmallerIdAmongEquals) {
  for (const int64_t size : {3, 8, 40}) {
    std::vector<float> logits(size, -1.0f);
    logits[1] = logits[size - 1] = 2.0f;
    EXPECT_EQ(Token(GetParam(), logits, Drawn(0.0f)), 1) << size;
    EXPECT_EQ(Token(GetParam(), logits, Drawn(1.0f, 1.0f, 1)), 1) << size;
  }
}

TEST_P(SampleTest, TakesBothZerosAsEqual) {
  EXPECT_EQ(Token(GetParam(), {-1.0f, -0.0f, 0.0f}, Drawn(0.0f)), 1);
  EXPECT_EQ(Token(GetParam(), {-1.0f, -0.0f, 0.0f}, Drawn(1.0f, 1.0f, 1)), 1);
}

TEST_P(SampleTest, FindsTheLargestWhereverItStands) {
  for (int32_t place = 0; place < 37; ++place) {
    std::vector<float> logits(37, 0.25f);
    logits[place] = 0.5f;
    EXPECT_EQ(Token(GetParam(), logits, Drawn(0.0f)), place);
  }
}

TEST_P(SampleTest, NeverChoosesALogitThatIsNotFinite) {
  const std::vector<float> logits = {kNan,      kInfinity,  1.0f, kNan, 2.0f, -kInfinity, kNan,
                                     kInfinity, -kInfinity, kNan, kNan, kNan, kNan};
  EXPECT_EQ(Token(GetParam(), logits, Drawn(0.0f)), 4);
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f)), (std::set<int32_t>{2, 4}));
}

TEST_P(SampleTest, RefusesARowWithoutAFiniteLogit) {
  const std::vector<float> logits = {kNan, kInfinity, -kInfinity};
  for (const float temperature : {0.0f, 1.0f}) {
    SamplingArgs args = Drawn(temperature);
    args.logits = View(logits);
    const absl::Status status = GetParam()(args, Exec{}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("none of the 3 logits is finite"));
  }
}

TEST_P(SampleTest, DrawsEachTokenAsOftenAsItsProbability) {
  // Probabilities 0.5, 0.3 and 0.2, whatever constant is added to the logits.
  const std::vector<float> logits = {std::log(3.0f) + 9.0f, std::log(2.0f) + 9.0f,
                                     std::log(5.0f) + 9.0f};
  constexpr int kDraws = 20000;
  std::map<int32_t, int> counts = Histogram(GetParam(), logits, Drawn(1.0f), kDraws);
  const double expected[] = {0.3, 0.2, 0.5};
  double chi_square = 0.0;
  for (int32_t id = 0; id < 3; ++id) {
    const double mean = expected[id] * kDraws;
    chi_square += (counts[id] - mean) * (counts[id] - mean) / mean;
  }
  EXPECT_LT(chi_square, 13.8);  // Two degrees of freedom: exceeded once in a thousand.
}

TEST_P(SampleTest, DividesByTheTemperature) {
  // At temperature 2 the odds of 9 : 1 become 3 : 1.
  const std::vector<float> logits = {std::log(9.0f), 0.0f};
  constexpr int kDraws = 20000;
  std::map<int32_t, int> counts = Histogram(GetParam(), logits, Drawn(2.0f), kDraws);
  EXPECT_NEAR(counts[0] / double{kDraws}, 0.75, 0.012);  // Four deviations.
}

TEST_P(SampleTest, KeepsToTheTopK) {
  const std::vector<float> logits = {0.0f, 0.3f, 0.1f, 0.2f};
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 1.0f, 2)), (std::set<int32_t>{1, 3}));
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 1.0f, 0)).size(), 4u);
}

TEST_P(SampleTest, TakesATopKBeyondTheVocabulary) {
  const std::vector<float> logits = {0.0f, 0.3f, 0.1f};
  const SamplingArgs all = Drawn(1.0f, 1.0f, 0);
  const SamplingArgs beyond = Drawn(1.0f, 1.0f, std::numeric_limits<int32_t>::max());
  EXPECT_EQ(Histogram(GetParam(), logits, all, 300), Histogram(GetParam(), logits, beyond, 300));
}

TEST_P(SampleTest, KeepsTheSmallestPrefixThatReachesTopP) {
  // Probabilities 1/2, 1/4, 1/8, 1/8: exact in f32 up to the rounding of the exponential.
  const float ln2 = 0.6931472f;
  const std::vector<float> logits = {-2 * ln2, 0.0f, -ln2, -2 * ln2};
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 0.4f)), (std::set<int32_t>{1}));
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 0.6f)), (std::set<int32_t>{1, 2}));
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 0.8f)), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 1.0f)), (std::set<int32_t>{0, 1, 2, 3}));
}

TEST_P(SampleTest, MeasuresTopPAgainstWhatTopKLeft) {
  // The two kept tokens hold 0.4 and 0.3 of the whole, 0.57 and 0.43 of what is left.
  const std::vector<float> logits = {std::log(4.0f), std::log(3.0f), std::log(2.0f), 0.0f};
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 0.55f, 2)), (std::set<int32_t>{0}));
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1.0f, 0.6f, 2)), (std::set<int32_t>{0, 1}));
}

TEST_P(SampleTest, DropsTokensThatAreLessLikelyThanMinPOfTheLikeliest) {
  // Likelihoods 1, 1/2, 1/4, 1/8 of the largest.
  const float ln2 = 0.69314718f;
  const std::vector<float> logits = {-3 * ln2, -ln2, 0.0f, -2 * ln2};
  const auto drawn = [&](float min_p, float temperature = 1.0f, float top_p = 1.0f) {
    SamplingArgs args = Drawn(temperature, top_p);
    args.min_p = min_p;
    std::set<int32_t> ids;
    for (const auto& [id, count] : Histogram(GetParam(), logits, args, 400)) ids.insert(id);
    return ids;
  };
  EXPECT_EQ(drawn(0.0f), (std::set<int32_t>{0, 1, 2, 3}));
  EXPECT_EQ(drawn(0.2f), (std::set<int32_t>{1, 2, 3}));
  EXPECT_EQ(drawn(0.4f), (std::set<int32_t>{1, 2}));
  EXPECT_EQ(drawn(1.0f), (std::set<int32_t>{2}));
  EXPECT_EQ(drawn(0.4f, 4.0f), (std::set<int32_t>{0, 1, 2, 3}));  // After the temperature.
  EXPECT_EQ(drawn(0.2f, 1.0f, 0.6f), (std::set<int32_t>{1, 2}));  // top_p has cut before.
}

TEST_P(SampleTest, KeepsAllOfTheLikeliestWithMinPOfOne) {
  SamplingArgs args = Drawn(1.0f);
  args.min_p = 1.0f;
  std::map<int32_t, int> counts = Histogram(GetParam(), {2.0f, 1.99f, 2.0f}, args, 400);
  EXPECT_EQ(counts[1], 0);
  EXPECT_NEAR(counts[0], 200, 60);
}

TEST_P(SampleTest, BecomesGreedyAtTinyTemperaturesAndTinyTopP) {
  const std::vector<float> logits = {1.0f, 3.0e38f, 2.0f, -3.0e38f};
  EXPECT_EQ(Support(GetParam(), logits, Drawn(1e-30f)), (std::set<int32_t>{1}));
  EXPECT_EQ(Support(GetParam(), {1.0f, 1.5f}, Drawn(1.0f, 1e-30f)), (std::set<int32_t>{1}));
}

TEST_P(SampleTest, BecomesUniformAtAHugeTemperature) {
  std::map<int32_t, int> counts =
      Histogram(GetParam(), {1.0f, 50.0f, -50.0f, 2.0f}, Drawn(1e30f), 8000);
  for (int32_t id = 0; id < 4; ++id) EXPECT_NEAR(counts[id] / 8000.0, 0.25, 0.02) << id;
}

TEST_P(SampleTest, RepeatsFromTheSameSeedAndCounterOnly) {
  const std::vector<float> logits(64, 0.0f);
  std::vector<int32_t> first, again, other_seed;
  for (uint64_t i = 0; i < 100; ++i) {
    SamplingArgs args = Drawn(1.0f);
    args.counter = i;
    args.seed = 7;
    first.push_back(Token(GetParam(), logits, args));
    again.push_back(Token(GetParam(), logits, args));
    args.seed = 8;
    other_seed.push_back(Token(GetParam(), logits, args));
  }
  EXPECT_EQ(first, again);
  EXPECT_NE(first, other_seed);
}

std::string OperationName(const ::testing::TestParamInfo<Operation>& param) {
  return param.param == Sample ? "Sample" : "Definition";
}
INSTANTIATE_TEST_SUITE_P(Operation, SampleTest, ::testing::Values(Sample, SampleDefinition),
                         OperationName);

// ---- The uniform numbers.

// Tokens that were sampled before must be sampled again after an upgrade: these values are fixed.
TEST(UniformAtTest, IsTheSameEverywhereAndForEver) {
  EXPECT_EQ(UniformAt(0, 0), 10946269 * 0x1p-24f);
  EXPECT_EQ(UniformAt(0, 1), 11764387 * 0x1p-24f);
  EXPECT_EQ(UniformAt(12345, 678), 14207161 * 0x1p-24f);
}

TEST(UniformAtTest, LiesInTheHalfOpenUnitInterval) {
  for (uint64_t i = 0; i < 100000; ++i) {
    const float u = UniformAt(i * 0x9e3779b97f4a7c15u, i);
    ASSERT_GE(u, 0.0f);
    ASSERT_LT(u, 1.0f);
    ASSERT_EQ(u * 0x1p24f, std::floor(u * 0x1p24f));  // 24 bits.
  }
}

TEST(UniformAtTest, SpreadsNeighbouringSeedsAndCounters) {
  for (const bool by_seed : {false, true}) {
    std::vector<int> bucket(64, 0);
    double product = 0.0;
    for (uint64_t i = 0; i < 64000; ++i) {
      const float u = by_seed ? UniformAt(i, 3) : UniformAt(3, i);
      const float next = by_seed ? UniformAt(i + 1, 3) : UniformAt(3, i + 1);
      ++bucket[static_cast<size_t>(u * 64.0f)];
      product += (u - 0.5) * (next - 0.5);
    }
    double chi_square = 0.0;
    for (const int count : bucket) chi_square += (count - 1000.0) * (count - 1000.0) / 1000.0;
    EXPECT_LT(chi_square, 103.4);                       // 63 degrees: once in a thousand.
    EXPECT_NEAR(product / 64000.0 * 12.0, 0.0, 0.016);  // Correlation, four deviations.
  }
}

TEST(UniformAtTest, DoesNotRepeatOneStreamUnderAnotherSeed) {
  std::set<float> zero;
  for (uint64_t i = 0; i < 1000; ++i) zero.insert(UniformAt(0, i));
  int shared = 0;
  for (uint64_t i = 0; i < 1000; ++i) shared += static_cast<int>(zero.count(UniformAt(1, i)));
  EXPECT_LT(shared, 5);  // By chance 0.06 of a thousand draws among 2^24 values.
}

// ---- Refusals.

TEST(ValidateSamplingTest, AcceptsWhatTheContractAllows) {
  EXPECT_TRUE(ValidateSampling(0.0f, 1.0f, 0).ok());
  EXPECT_TRUE(ValidateSampling(2.0f, 1e-6f, 2147483647).ok());
}

TEST(ValidateSamplingTest, NamesTheFieldThatIsWrong) {
  struct Bad {
    float temperature, top_p;
    int32_t top_k;
    const char* reason;
    float min_p = 0.0f;
  };
  for (const Bad& bad :
       {Bad{-0.1f, 1.0f, 0, "temperature is -0.1"}, Bad{kNan, 1.0f, 0, "temperature is nan"},
        Bad{kInfinity, 1.0f, 0, "temperature is inf"}, Bad{1.0f, 0.0f, 0, "top_p is 0"},
        Bad{1.0f, 1.5f, 0, "top_p is 1.5"}, Bad{1.0f, kNan, 0, "top_p is nan"},
        Bad{1.0f, -kInfinity, 0, "top_p is -inf"}, Bad{1.0f, 1.0f, -1, "top_k is -1"},
        Bad{1.0f, 1.0f, 0, "min_p is nan", kNan}, Bad{1.0f, 1.0f, 0, "min_p is -0.5", -0.5f},
        Bad{1.0f, 1.0f, 0, "min_p is 1.5", 1.5f}}) {
    const absl::Status status = ValidateSampling(bad.temperature, bad.top_p, bad.top_k, bad.min_p);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.reason));
    const std::vector<float> logits = {1.0f};
    SamplingArgs args = Drawn(bad.temperature, bad.top_p, bad.top_k);
    args.logits = View(logits);
    args.min_p = bad.min_p;
    EXPECT_EQ(Sample(args, Exec{}).status(), status);
    EXPECT_EQ(SampleDefinition(args, Exec{}).status(), status);
  }
}

TEST(SamplingTest, RefusesNoLogitsAndOtherTypes) {
  EXPECT_EQ(Sample(Drawn(0.0f), Exec{}).status().code(), absl::StatusCode::kInvalidArgument);
  const std::vector<float> logits = {1.0f};
  SamplingArgs args = Drawn(0.0f);
  args.logits = {logits.data(), DType::kBf16, 1};
  EXPECT_EQ(Sample(args, Exec{}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SamplingTest, SaysWhenAnArchitectureHasNoVariant) {
  const std::vector<float> logits = {1.0f};
  SamplingArgs args = Drawn(0.0f);
  args.logits = View(logits);
  EXPECT_EQ(Sample(args, Exec{.arch = 90}).status().code(), absl::StatusCode::kUnimplemented);
}

// ---- The table against the definition.

// Runs once per table entry: a new variant is tested by being listed.
class SamplingVariantTest : public ::testing::TestWithParam<SamplingVariant> {};

TEST_P(SamplingVariantTest, ChoosesTheTokensOfTheDefinition) {
  const SamplingVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  Workspace workspace;
  const Exec exec = {.workspace = &workspace};
  for (const int64_t vocabulary : {1, 7, 1000, 129280}) {
    std::vector<float> logits = NormalValues(static_cast<uint64_t>(vocabulary), vocabulary, 3.0f);
    // Ties and holes, as masks and coarse logits make them.
    for (int64_t id = 0; id < vocabulary; ++id) {
      if (id % 3 == 0) logits[id] = std::round(logits[id]);
      if (id % 11 == 5) logits[id] = id % 2 == 0 ? kNan : -kInfinity;
    }
    // One of the real vocabulary: the definition sorts it in seconds under a sanitizer.
    const int draws = vocabulary > 1000 ? 1 : 50;
    for (const SamplingArgs& base :
         {Drawn(0.0f), Drawn(1.0f), Drawn(0.6f, 0.95f), Drawn(1.0f, 0.5f), Drawn(1.5f, 1.0f, 40),
          Drawn(3.0f, 0.3f, 5)}) {
      SamplingArgs args = base;
      args.logits = View(logits);
      args.seed = 99;
      args.min_p = base.top_k == 40 ? 0.1f : 0.0f;
      if (variant.supports != nullptr && !variant.supports(args)) continue;
      for (args.counter = 0; args.counter < static_cast<uint64_t>(draws); ++args.counter) {
        const absl::StatusOr<int32_t> token = variant.launch(args, exec);
        const absl::StatusOr<int32_t> expected = SampleDefinition(args, Exec{});
        ASSERT_TRUE(token.ok() && expected.ok());
        ASSERT_EQ(*token, *expected)
            << vocabulary << " logits, temperature " << args.temperature << ", top_p " << args.top_p
            << ", top_k " << args.top_k << ", counter " << args.counter;
      }
    }
  }
}

// Rows as a model gives them and as none does, against the trusted path.
std::vector<float> RowOf(int kind, int64_t vocab, uint64_t seed) {
  std::vector<float> row = NormalValues(seed, vocab, kind == 1 ? 0.01f : 3.0f);
  for (int64_t id = 0; id < vocab; ++id) {
    float& logit = row[static_cast<size_t>(id)];
    if (kind == 2 && id % 97 == 3) logit += 25.0f - 0.1f * static_cast<float>(id % 50);
    if (kind == 3) logit = std::round(logit * 4.0f) * 0.25f;  // Ties.
    if (kind == 4) logit = id % 3 == 0 ? 0.0f : -0.0f;
    if (kind == 5 && id > 2) logit = -80.0f;  // Masses next to nothing.
    if (kind == 6) logit *= 1e37f;
    if (kind == 7) logit = id == vocab / 2 ? 30.0f : logit - 30.0f;  // One stands out.
    if (id % 41 == 7) logit = id % 2 == 0 ? kNan : (id % 3 == 0 ? kInfinity : -kInfinity);
  }
  return row;
}

TEST_P(SamplingVariantTest, ChoosesTheTokensOfTheTrustedPathInEveryRow) {
  const SamplingVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  Workspace workspace;
  const Exec exec = {.workspace = &workspace};
  for (const int64_t vocab : {256, 3001}) {
    for (int kind = 0; kind < 8; ++kind) {
      const std::vector<float> row = RowOf(kind, vocab, static_cast<uint64_t>(kind));
      for (const float temperature : {1.0f, 0.3f, 1e-3f, 2.0f, 1e30f}) {
        for (const float top_p : {1.0f, 0.95f, 0.5f, 0.9999f, 1e-6f}) {
          for (const int32_t top_k : {0, 1, 50, 700}) {
            SamplingArgs args = Drawn(temperature, top_p, top_k);
            args.logits = View(row);
            if (variant.supports != nullptr && !variant.supports(args)) continue;
            for (args.counter = 0; args.counter < 4; ++args.counter) {
              args.min_p = args.counter == 3 ? 0.02f : 0.0f;
              ASSERT_EQ(*variant.launch(args, exec), *LaunchSampleCpu(args, exec))
                  << vocab << " logits, row " << kind << ", temperature " << temperature
                  << ", top_p " << top_p << ", top_k " << top_k << ", counter " << args.counter;
            }
          }
        }
      }
    }
  }
}

// What the trusted path alone takes is the scratch for a ranking of all tokens.
class CandidatesTest : public ::testing::Test {
 protected:
  int64_t ScratchOf(SamplingArgs args, const std::vector<float>& row) {
    Workspace workspace;
    args.logits = View(row);
    const absl::StatusOr<int32_t> token =
        LaunchSampleCandidates(args, Exec{.workspace = &workspace});
    EXPECT_EQ(*token, *LaunchSampleCpu(args, Exec{}));
    return workspace.peak_bytes();
  }
  const int64_t all_ = SampleScratchBytes(5000);
};

TEST_F(CandidatesTest, AreFoundWithoutARankingOfAll) {
  for (const int kind : {0, 2, 7}) {
    const std::vector<float> row = RowOf(kind, 5000, 1);
    for (uint64_t counter = 0; counter < 20; ++counter) {
      SamplingArgs args = Drawn(1.0f, 0.95f);
      args.counter = counter;
      EXPECT_LT(ScratchOf(args, row), all_) << kind;
      args.top_p = 1.0f;
      EXPECT_LT(ScratchOf(args, row), all_) << kind;
      args.min_p = 0.1f;
      EXPECT_LT(ScratchOf(args, row), all_) << kind;
      args.top_k = 50;
      EXPECT_LT(ScratchOf(args, row), all_ / 10) << kind;
    }
  }
}

TEST_F(CandidatesTest, LeaveACutThatHangsOnTheOrderOfASumToTheTrustedPath) {
  // Half of equal masses is reached exactly, or nearly, by half of them.
  EXPECT_EQ(ScratchOf(Drawn(1.0f, 0.5f), std::vector<float>(5000, 1.0f)), all_);
  EXPECT_LT(ScratchOf(Drawn(1.0f, 0.50005f), std::vector<float>(5000, 1.0f)), 2 * all_);
}

INSTANTIATE_TEST_SUITE_P(Table, SamplingVariantTest,
                         ::testing::ValuesIn(SamplingVariants().begin(), SamplingVariants().end()));

}  // namespace
}  // namespace isthmus::kernels
