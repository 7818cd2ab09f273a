// SPDX-License-Identifier: Apache-2.0
// What a client may say about its tokens: every value that is refused, and what is filled in.
#include "router/sampling.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "services/base/reply_seed.h"

namespace isthmus::router {
namespace {

using testing::HasSubstr;

v1::ClusterValues Values() {
  v1::ClusterValues values;
  values.set_max_sequence_tokens(50000);
  values.set_vocab_size(2000);
  values.set_end_token_id(1);
  return values;
}

absl::StatusOr<v1::SamplingParams> Complete(const v1::SamplingParams& asked,
                                            uint64_t num_prompt_tokens = 10) {
  return CompleteSampling(asked, RouterConfig(), Values(), num_prompt_tokens);
}

TEST(CompleteSamplingTest, FillsInEveryOptionalField) {
  RouterConfig config;
  config.default_temperature = 0.5;
  config.default_top_p = 0.9;
  config.default_top_k = 40;
  config.default_min_p = 0.05;
  config.default_output_tokens = 77;
  const auto sampling = CompleteSampling({}, config, Values(), 10);
  ASSERT_TRUE(sampling.ok()) << sampling.status();
  EXPECT_EQ(sampling->temperature(), 0.5);
  EXPECT_EQ(sampling->top_p(), 0.9);
  EXPECT_EQ(sampling->top_k(), 40);
  EXPECT_EQ(sampling->min_p(), 0.05);
  EXPECT_EQ(sampling->repetition_penalty(), 1);
  EXPECT_EQ(sampling->max_output_tokens(), 77);
  EXPECT_EQ(sampling->num_replies(), 1);
  EXPECT_TRUE(sampling->has_seed() && sampling->has_frequency_penalty() &&
              sampling->has_presence_penalty() && sampling->has_min_output_tokens());
  EXPECT_FALSE(sampling->has_top_logprobs() || sampling->has_top_prompt_logprobs());
  EXPECT_EQ(CompleteSampling({}, config, Values(), 49990)->max_output_tokens(), 10);
}

TEST(CompleteSamplingTest, WhatTheClientSaysCounts) {
  v1::SamplingParams asked;
  asked.set_temperature(0);
  asked.set_top_k(0);
  asked.set_min_p(0);
  asked.set_seed(0);
  RouterConfig config;
  config.default_top_k = 40;
  config.default_min_p = 0.05;
  const auto sampling = CompleteSampling(asked, config, Values(), 10);
  ASSERT_TRUE(sampling.ok()) << sampling.status();
  EXPECT_EQ(sampling->temperature(), 0);
  EXPECT_EQ(sampling->top_k(), 0);
  EXPECT_EQ(sampling->min_p(), 0);
  EXPECT_EQ(sampling->seed(), 0);
}

TEST(CompleteSamplingTest, WorkersDoNotLearnOfTheTextThatEndsAReply) {
  v1::SamplingParams asked;
  asked.add_stop_strings("secret");
  asked.add_stop_token_ids(7);
  const v1::SamplerState state = SamplerOf(*Complete(asked));
  EXPECT_EQ(state.sampling().stop_strings_size(), 0);
  EXPECT_EQ(state.sampling().stop_token_ids(0), 7);
  EXPECT_EQ(state.num_draws(), 0);
}

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Bad {
  std::function<void(v1::SamplingParams&)> spoil;
  const char* message;
  uint64_t num_prompt_tokens = 10;
};

void ExpectRefused(const std::vector<Bad>& table) {
  for (const Bad& bad : table) {
    v1::SamplingParams asked;
    bad.spoil(asked);
    const absl::Status status = Complete(asked, bad.num_prompt_tokens).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.message));
  }
}

using Params = v1::SamplingParams;

TEST(CompleteSamplingTest, RefusesNumbersByNameWithTheirLimits) {
  ExpectRefused({
      {[](Params& p) { p.set_temperature(kNan); }, "sampling.temperature: is nan, want 0 to 2"},
      {[](Params& p) { p.set_temperature(-0.5); }, "sampling.temperature: is -0.5, want 0 to 2"},
      {[](Params& p) { p.set_temperature(kInfinity); }, "sampling.temperature: is inf"},
      {[](Params& p) { p.set_temperature(1e300); }, "sampling.temperature: is 1e+300"},
      {[](Params& p) { p.set_top_p(kNan); }, "sampling.top_p: is nan, want above 0, at most 1"},
      {[](Params& p) { p.set_top_p(0); }, "sampling.top_p: is 0"},
      {[](Params& p) { p.set_top_p(1.5); }, "sampling.top_p: is 1.5"},
      {[](Params& p) { p.set_top_k(3000000000u); }, "sampling.top_k: is 3000000000"},
      {[](Params& p) { p.set_min_p(kNan); }, "sampling.min_p: is nan, want 0 to 1"},
      {[](Params& p) { p.set_min_p(-0.1); }, "sampling.min_p: is -0.1"},
      {[](Params& p) { p.set_min_p(1.01); }, "sampling.min_p: is 1.01"},
      {[](Params& p) { p.set_repetition_penalty(kNan); }, "sampling.repetition_penalty: is nan"},
      {[](Params& p) { p.set_repetition_penalty(0); },
       "sampling.repetition_penalty: is 0, want above 0, at most 2"},
      {[](Params& p) { p.set_repetition_penalty(kInfinity); }, "repetition_penalty: is inf"},
      {[](Params& p) { p.set_repetition_penalty(-1); }, "sampling.repetition_penalty: is -1"},
      {[](Params& p) { p.set_frequency_penalty(kNan); },
       "sampling.frequency_penalty: is nan, want -2 to 2"},
      {[](Params& p) { p.set_frequency_penalty(-2.1); }, "sampling.frequency_penalty: is -2.1"},
      {[](Params& p) { p.set_presence_penalty(-kInfinity); }, "sampling.presence_penalty: is -inf"},
      {[](Params& p) { p.set_presence_penalty(3); }, "sampling.presence_penalty: is 3"},
      {[](Params& p) { p.set_num_replies(0); }, "sampling.num_replies: is 0, want 1 to 16"},
      {[](Params& p) { p.set_num_replies(17); }, "sampling.num_replies: is 17"},
      {[](Params& p) { p.set_num_replies(4294967295u); }, "sampling.num_replies: is 4.29497e+09"},
      {[](Params& p) { p.set_top_logprobs(21); }, "sampling.top_logprobs: is 21, want 0 to 20"},
      {[](Params& p) { p.set_top_prompt_logprobs(21); }, "sampling.top_prompt_logprobs: is 21"},
  });
}

TEST(CompleteSamplingTest, RefusesLengthsThatContradictEachOther) {
  ExpectRefused({
      {[](Params& p) { p.set_max_output_tokens(0); },
       "sampling.max_output_tokens: is 0, want at least 1"},
      {[](Params& p) {
         p.set_max_output_tokens(4);
         p.set_min_output_tokens(5);
       },
       "sampling.min_output_tokens: is 5, want at most 4"},
      {[](Params& p) { p.set_min_output_tokens(1025); },
       "sampling.min_output_tokens: is 1025, want at most 1024"},
      {[](Params& p) { p.set_min_output_tokens(11); },
       "sampling.min_output_tokens: is 11, want at most 10", 49990},
      {[](Params& p) { p.set_top_prompt_logprobs(0); },
       "sampling.top_prompt_logprobs: the prompt has 32769 tokens, want at most 32768", 32769},
  });
}

TEST(CompleteSamplingTest, RefusesListsOfTokens) {
  ExpectRefused({
      {[](Params& p) { (*p.mutable_logit_bias())[3] = kNan; },
       "sampling.logit_bias[3]: is nan, want -100 to 100"},
      {[](Params& p) { (*p.mutable_logit_bias())[3] = 100.5; }, "sampling.logit_bias[3]: is 100.5"},
      {[](Params& p) { (*p.mutable_logit_bias())[2000] = 1; },
       "sampling.logit_bias: has token 2000, want 0 to 1999"},
      {[](Params& p) {
         for (uint32_t i = 0; i < 1025; ++i) (*p.mutable_logit_bias())[i] = 1;
       },
       "sampling.logit_bias: has 1025 entries, want at most 1024"},
      {[](Params& p) { p.add_banned_token_ids(4294967295u); },
       "sampling.banned_token_ids: has token 4294967295, want 0 to 1999"},
      {[](Params& p) {
         p.add_banned_token_ids(7);
         p.add_banned_token_ids(7);
       },
       "sampling.banned_token_ids: has token 7 twice"},
      {[](Params& p) {
         for (uint32_t i = 0; i < 1025; ++i) p.add_banned_token_ids(i);
       },
       "sampling.banned_token_ids: has 1025 entries, want at most 1024"},
      {[](Params& p) {
         p.add_banned_token_ids(7);
         (*p.mutable_logit_bias())[7] = 1;
       },
       "sampling.banned_token_ids: has token 7, which logit_bias has as well"},
      {[](Params& p) { p.add_stop_token_ids(2000); },
       "sampling.stop_token_ids: has token 2000, want 0 to 1999"},
      {[](Params& p) {
         p.add_stop_token_ids(3);
         p.add_stop_token_ids(3);
       },
       "sampling.stop_token_ids: has token 3 twice"},
      {[](Params& p) {
         for (uint32_t i = 0; i < 65; ++i) p.add_stop_token_ids(i);
       },
       "sampling.stop_token_ids: has 65 entries, want at most 64"},
  });
}

TEST(CompleteSamplingTest, RefusesStopStrings) {
  ExpectRefused({
      {[](Params& p) { p.add_stop_strings(""); },
       "sampling.stop_strings[0]: has 0 bytes, want 1 to 256"},
      {[](Params& p) { p.add_stop_strings(std::string(257, 'a')); },
       "sampling.stop_strings[0]: has 257 bytes, want 1 to 256"},
      {[](Params& p) {
         p.add_stop_strings("fine");
         p.add_stop_strings("bad \xff");
       },
       "sampling.stop_strings[1]"},
      {[](Params& p) {
         p.add_stop_strings("a");
         p.add_stop_strings("b");
         p.add_stop_strings("a");
       },
       "sampling.stop_strings[2]: is the same as number 0"},
      {[](Params& p) {
         for (int i = 0; i < 17; ++i) p.add_stop_strings(std::to_string(i));
       },
       "sampling.stop_strings: has 17 entries, want at most 16"},
  });
}

TEST(CompleteSamplingTest, RefusesBansThatLeaveNothing) {
  v1::ClusterValues small = Values();
  small.set_vocab_size(4);
  v1::SamplingParams asked;
  for (const uint32_t id : {0, 2}) asked.add_banned_token_ids(id);
  asked.add_stop_token_ids(3);
  EXPECT_TRUE(CompleteSampling(asked, RouterConfig(), small, 10).ok());
  asked.set_min_output_tokens(2);
  const absl::Status status = CompleteSampling(asked, RouterConfig(), small, 10).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("leaves no token of the 4"));
  asked.set_ignores_end_token(true);
  EXPECT_TRUE(CompleteSampling(asked, RouterConfig(), small, 10).ok());
}

TEST(CompleteSamplingTest, TakesTheLimitsThemselves) {
  v1::SamplingParams asked;
  asked.set_temperature(2);
  asked.set_top_p(1);
  asked.set_top_k(2147483647);
  asked.set_min_p(1);
  asked.set_repetition_penalty(2);
  asked.set_frequency_penalty(-2);
  asked.set_presence_penalty(2);
  asked.set_num_replies(16);
  asked.set_top_logprobs(20);
  asked.set_top_prompt_logprobs(20);
  asked.set_max_output_tokens(3);
  asked.set_min_output_tokens(3);
  for (uint32_t i = 0; i < 900; ++i) (*asked.mutable_logit_bias())[i] = i % 2 == 0 ? 100 : -100;
  for (uint32_t i = 900; i < 1924; ++i) asked.add_banned_token_ids(i);
  for (uint32_t i = 0; i < 64; ++i) asked.add_stop_token_ids(i);
  for (int i = 0; i < 16; ++i)
    asked.add_stop_strings(std::string(static_cast<size_t>(241 + i), 'a'));
  const auto sampling = Complete(asked, 32768);
  EXPECT_TRUE(sampling.ok()) << sampling.status();
}

TEST(ReplySeedTest, IsTheRequestsOwnForTheFirstReplyAndAnotherForEachFurtherOne) {
  std::set<uint64_t> seeds;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    EXPECT_EQ(ReplySeed(seed, 0), seed);
    for (uint32_t reply = 0; reply < 16; ++reply) seeds.insert(ReplySeed(seed, reply));
  }
  EXPECT_EQ(seeds.size(), 1600u);
  // What a client was told must stay true after an upgrade.
  EXPECT_EQ(ReplySeed(7, 1), 0xf75f04cbb5a1a1ddu);
}

}  // namespace
}  // namespace isthmus::router
