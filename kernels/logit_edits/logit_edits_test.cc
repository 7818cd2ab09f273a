// SPDX-License-Identifier: Apache-2.0
// Logit edits by hand, refusals, and the table against the definition.
#include "kernels/logit_edits/logit_edits.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/workspace.h"
#include "kernels/logit_edits/logit_edits_variants.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {

void PrintTo(const LogitEditsVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

using Operation = absl::Status (*)(const LogitEditsArgs&, const Exec&);

// Of all ids below 1000, counted one by one.
std::vector<TokenMention> Mentions(const std::vector<int32_t>& prompt,
                                   const std::vector<int32_t>& output) {
  std::vector<TokenMention> mentions;
  for (int32_t id = 0; id < 1000; ++id) {
    const auto in_output = static_cast<int32_t>(std::ranges::count(output, id));
    if (in_output == 0 && std::ranges::count(prompt, id) == 0) continue;
    mentions.push_back({.id = id, .in_output = in_output});
  }
  return mentions;
}

class LogitEditsTest : public ::testing::TestWithParam<Operation> {
 protected:
  std::vector<float> Edited(std::vector<float> logits, LogitEditsArgs args) {
    args.logits = logits;
    const absl::Status status = GetParam()(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return logits;
  }
};

TEST_P(LogitEditsTest, ChangesNothingUnlessAsked) {
  const std::vector<TokenMention> mentions = Mentions({0, 1, 2}, {0, 1, 2});
  const std::vector<float> logits = {1.5f, -2.0f, 0.25f, -0.0f};
  const std::vector<float> same = Edited(logits, {.mentions = mentions});
  EXPECT_EQ(std::memcmp(same.data(), logits.data(), 4 * sizeof(float)), 0);
}

TEST_P(LogitEditsTest, DividesPositiveAndMultipliesNegativeLogitsOfKnownTokensOnce) {
  const std::vector<TokenMention> mentions = Mentions({0, 1, 0}, {1, 2, 2});
  EXPECT_THAT(Edited({4.0f, -4.0f, 0.0f, 4.0f}, {.mentions = mentions, .repetition_penalty = 2.0f}),
              ElementsAre(2.0f, -8.0f, 0.0f, 4.0f));
}

TEST_P(LogitEditsTest, CountsOccurrencesInTheOutputAlone) {
  const std::vector<TokenMention> mentions = Mentions({0, 0}, {1, 2, 2});
  EXPECT_THAT(Edited({4.0f, 4.0f, 4.0f}, {.mentions = mentions, .frequency_penalty = 0.5f}),
              ElementsAre(4.0f, 3.5f, 3.0f));
  EXPECT_THAT(Edited({4.0f, 4.0f, 4.0f}, {.mentions = mentions, .presence_penalty = -1.0f}),
              ElementsAre(4.0f, 5.0f, 5.0f));
}

TEST_P(LogitEditsTest, AppliesPenaltiesThenBiasesThenBans) {
  const std::vector<TokenMention> mentions = Mentions({0}, {0, 1});
  const std::vector<int32_t> banned = {1};
  const std::vector<LogitBias> biases = {{0, 100.0f}, {1, 100.0f}, {2, -3.0f}};
  EXPECT_THAT(Edited({4.0f, 4.0f, 4.0f, 4.0f}, {.mentions = mentions,
                                                .repetition_penalty = 2.0f,
                                                .frequency_penalty = 0.25f,
                                                .presence_penalty = 0.5f,
                                                .biases = biases,
                                                .banned_ids = banned}),
              ElementsAre(4.0f / 2.0f - 0.75f + 100.0f, -kInfinity, 1.0f, 4.0f));
}

TEST_P(LogitEditsTest, MakesNoNumberOfWhatIsNone) {
  const std::vector<TokenMention> all = Mentions({0, 1, 2, 3}, {0, 1, 2, 3});
  const std::vector<int32_t> banned = {3};
  const std::vector<LogitBias> biases = {{0, 5.0f}, {1, 5.0f}, {2, 5.0f}, {3, 5.0f}};
  const std::vector<float> edited =
      Edited({kNan, kInfinity, -kInfinity, kNan}, {.mentions = all,
                                                   .repetition_penalty = 2.0f,
                                                   .presence_penalty = 1.0f,
                                                   .biases = biases,
                                                   .banned_ids = banned});
  EXPECT_TRUE(std::isnan(edited[0]));
  EXPECT_EQ(edited[1], kInfinity);
  EXPECT_EQ(edited[2], -kInfinity);
  EXPECT_EQ(edited[3], -kInfinity);
}

TEST_P(LogitEditsTest, KeepsFiniteLogitsFinite) {
  const std::vector<TokenMention> all = Mentions({}, {0, 1});
  EXPECT_THAT(Edited({kLargest, -kLargest},
                     {.mentions = all, .repetition_penalty = 2.0f, .presence_penalty = 0.0f}),
              ElementsAre(kLargest / 2.0f, -kLargest));
  EXPECT_THAT(Edited({kLargest, -kLargest},
                     {.mentions = all, .repetition_penalty = 0.5f, .presence_penalty = 0.0f}),
              ElementsAre(kLargest, -kLargest / 2.0f));
}

TEST_P(LogitEditsTest, RefusesWhatBreaksTheContract) {
  struct Bad {
    std::function<void(LogitEditsArgs&)> spoil;
    const char* reason;
  };
  static const std::vector<TokenMention> negative = {{-1, 0}}, beyond = {{0, 0}, {4, 0}};
  static const std::vector<TokenMention> twice = {{0, 1}, {2, 1}, {2, 1}},
                                         falling = {{3, 0}, {1, 0}};
  static const std::vector<TokenMention> fewer = {{2, -1}};
  static const std::vector<int32_t> large = {0, 4};
  static const std::vector<LogitBias> no_number = {{1, kNan}}, no_token = {{4, 1.0f}};
  for (const Bad& bad : std::vector<Bad>{
           {[](LogitEditsArgs& a) { a.repetition_penalty = 0.0f; }, "repetition_penalty is 0"},
           {[](LogitEditsArgs& a) { a.repetition_penalty = kNan; }, "repetition_penalty is nan"},
           {[](LogitEditsArgs& a) { a.frequency_penalty = kInfinity; }, "frequency_penalty is inf"},
           {[](LogitEditsArgs& a) { a.presence_penalty = kNan; }, "presence_penalty is nan"},
           {[](LogitEditsArgs& a) { a.mentions = negative; }, "mentions[0] is -1"},
           {[](LogitEditsArgs& a) { a.mentions = beyond; }, "mentions[1] is 4"},
           {[](LogitEditsArgs& a) { a.mentions = twice; }, "mentions[2] is 2 behind 2"},
           {[](LogitEditsArgs& a) { a.mentions = falling; }, "mentions[1] is 1 behind 3"},
           {[](LogitEditsArgs& a) { a.mentions = fewer; }, "mentions[0] occurs -1 times"},
           {[](LogitEditsArgs& a) { a.banned_ids = large; }, "banned_ids[1] is 4"},
           {[](LogitEditsArgs& a) { a.biases = no_token; }, "biases[0] is 4"},
           {[](LogitEditsArgs& a) { a.biases = no_number; }, "biases[0] is nan"},
           {[](LogitEditsArgs& a) { a.logits = {}; }, "there are 0 logits"}}) {
    std::vector<float> logits = {1.0f, 2.0f, 3.0f, 4.0f};
    LogitEditsArgs args;
    args.logits = logits;
    bad.spoil(args);
    const absl::Status status = GetParam()(args, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.reason;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.reason));
    EXPECT_THAT(logits, ElementsAre(1.0f, 2.0f, 3.0f, 4.0f));
  }
}

std::string OperationName(const ::testing::TestParamInfo<Operation>& param) {
  return param.param == EditLogits ? "EditLogits" : "Definition";
}
INSTANTIATE_TEST_SUITE_P(Operation, LogitEditsTest,
                         ::testing::Values(EditLogits, EditLogitsDefinition), OperationName);

// Runs once per table entry: a new variant is tested by being listed.
class LogitEditsVariantTest : public ::testing::TestWithParam<LogitEditsVariant> {};

TEST_P(LogitEditsVariantTest, HasTheBitsOfTheDefinition) {
  const LogitEditsVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  Workspace workspace;
  for (const int64_t vocab : {1, 7, 500}) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      std::vector<float> logits = testing::NormalValues(seed, vocab, 3.0f);
      const std::vector<float> random = testing::NormalValues(seed + 1000, 200, 1.0f);
      const auto id = [&](size_t i) {
        return static_cast<int32_t>(std::fabs(random[i]) * 1e4f) % static_cast<int32_t>(vocab);
      };
      if (vocab > 3) logits[3] = kNan;
      std::vector<int32_t> prompt, output, banned;
      std::vector<LogitBias> biases;
      for (size_t i = 0; i < 60; ++i) prompt.push_back(id(i));
      for (size_t i = 60; i < 120; ++i) output.push_back(id(i));
      for (size_t i = 120; i < 125; ++i) banned.push_back(id(i));
      for (size_t i = 130; i < 160; ++i) biases.push_back({id(i), 10.0f * random[i]});
      const bool has_penalty = seed % 2 == 0;
      // A penalised one becomes +0, as a bias of 0 is added; others stay.
      if (has_penalty && vocab > 6) logits[5] = logits[6] = -0.0f;
      std::vector<float> expected = logits;
      const std::vector<TokenMention> mentions = Mentions(prompt, output);
      LogitEditsArgs args = {.logits = logits,
                             .mentions = mentions,
                             .repetition_penalty = has_penalty ? 1.3f : 1.0f,
                             .frequency_penalty = has_penalty ? 0.7f : 0.0f,
                             .presence_penalty = has_penalty ? -0.2f : 0.0f,
                             .biases = biases,
                             .banned_ids = banned};
      ASSERT_TRUE(variant.launch(args, Exec{.workspace = &workspace}).ok());
      EXPECT_EQ(workspace.peak_bytes(), EditLogitsScratchBytes(30));
      args.logits = expected;
      ASSERT_TRUE(EditLogitsDefinition(args, Exec{}).ok());
      ASSERT_EQ(std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)), 0)
          << vocab << " logits, seed " << seed;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Table, LogitEditsVariantTest,
                         ::testing::ValuesIn(LogitEditsVariants().begin(),
                                             LogitEditsVariants().end()));

}  // namespace
}  // namespace isthmus::kernels
