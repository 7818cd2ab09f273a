// SPDX-License-Identifier: Apache-2.0
// What a client may ask of its tokens, through three processes: stop strings, several replies, log
// probabilities, and parameters that are refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "services/base/reply_seed.h"
#include "services/rpc/identity.h"
#include "tests/integration/cluster.h"
#include "tests/integration/running_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;

class SamplingTest : public SharedClusterTest<SamplingTest> {
 public:
  static ClusterOptions Options() {
    ClusterOptions options;
    options.workers = {"max_sequences=10", "cache_tokens=32768"};
    return options;
  }

 protected:
  // What came of one request, by reply.
  struct Replies {
    std::map<uint32_t, std::string> content;
    std::map<uint32_t, std::vector<uint32_t>> tokens;
    std::map<uint32_t, std::vector<v1::TokenLogprobs>> logprobs;
    rpc::Outcome outcome;
  };

  static absl::StatusOr<Replies> Ask(const v1::GenerateRequest& request) {
    Replies replies;
    auto outcome =
        cluster_->client().Generate(request, kReplyPatience, [&](const v1::TokenDelta& delta) {
          const uint32_t index = delta.reply_index();
          replies.content[index] += delta.content();
          std::vector<uint32_t>& tokens = replies.tokens[index];
          tokens.insert(tokens.end(), delta.token_ids().begin(), delta.token_ids().end());
          std::vector<v1::TokenLogprobs>& logprobs = replies.logprobs[index];
          logprobs.insert(logprobs.end(), delta.logprobs().begin(), delta.logprobs().end());
        });
    if (!outcome.ok()) return outcome.status();
    replies.outcome = *std::move(outcome);
    return replies;
  }
  // Nothing of any request is left at the workers.
  static void ExpectAllFree() {
    EXPECT_TRUE(WaitUntil(absl::Seconds(20), [] {
      const v1::WorkerLoad load = cluster_->decode().Load();
      return load.transfers() == 0 && load.free_state_slots() == load.total_state_slots();
    }));
  }
};

TEST_F(SamplingTest, AStopStringEndsTheReplyAndItsSequence) {
  v1::GenerateRequest request = RequestOf(40, 300);
  request.mutable_sampling()->set_ignores_end_token(true);
  const auto whole = Ask(request);
  ASSERT_TRUE(whole.ok()) << whole.status() << cluster_->Logs();
  const std::string& text = whole->content.at(0);
  ASSERT_GT(text.size(), 60u);
  EXPECT_EQ(whole->outcome.ends[0].finish_reason(), v1::FINISH_REASON_LENGTH);
  // From the middle on, in case the text repeats itself; cut at characters.
  for (size_t begin = text.size() / 2; begin < text.size() / 2 + 12; ++begin) {
    if ((static_cast<unsigned char>(text[begin]) & 0xc0) == 0x80) continue;
    size_t end = begin + 5;
    while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) ++end;
    const std::string stop = text.substr(begin, end - begin);
    request.mutable_sampling()->clear_stop_strings();
    request.mutable_sampling()->add_stop_strings(stop);
    const auto cut = Ask(request);
    ASSERT_TRUE(cut.ok()) << cut.status();
    const auto content = cut->content.find(0);
    EXPECT_EQ(content == cut->content.end() ? "" : content->second,
              text.substr(0, text.find(stop)));
    const v1::ReplyEnd& reply_end = cut->outcome.ends[0];
    EXPECT_EQ(reply_end.finish_reason(), v1::FINISH_REASON_STOP);
    EXPECT_EQ(reply_end.stop_string(), stop);
    EXPECT_EQ(reply_end.output_tokens(), cut->tokens.at(0).size());
    EXPECT_EQ(cut->outcome.finish.usage().output_tokens(), cut->tokens.at(0).size());
    EXPECT_LT(cut->tokens.at(0).size(), whole->tokens.at(0).size());
  }
  ExpectAllFree();
}

TEST_F(SamplingTest, EachOfThreeRepliesIsThatOfARequestWithItsSeed) {
  v1::GenerateRequest request = RequestOf(300, 24);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_seed(11);
  request.mutable_sampling()->set_num_replies(3);
  const auto together = Ask(request);
  ASSERT_TRUE(together.ok()) << together.status() << cluster_->Logs();
  ASSERT_EQ(together->outcome.ends.size(), 3u);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < 3; ++i) {
    const v1::ReplyEnd& end = together->outcome.ends[i];
    EXPECT_EQ(end.reply_index(), i);
    EXPECT_EQ(end.seed(), ReplySeed(11, i));
    v1::GenerateRequest single = request;
    single.mutable_sampling()->set_num_replies(1);
    single.mutable_sampling()->set_seed(end.seed());
    const auto alone = Ask(single);
    ASSERT_TRUE(alone.ok()) << alone.status();
    EXPECT_EQ(together->tokens.at(i), alone->tokens.at(0)) << "reply " << i;
    EXPECT_EQ(end.finish_reason(), alone->outcome.ends[0].finish_reason());
    sum += end.output_tokens();
  }
  EXPECT_EQ(together->outcome.finish.usage().output_tokens(), sum);
  EXPECT_NE(together->tokens.at(0), together->tokens.at(1));
  ExpectAllFree();
}

TEST_F(SamplingTest, OneOfSeveralRepliesMayMeetAStopString) {
  v1::GenerateRequest request = RequestOf(60, 120);
  request.mutable_sampling()->set_temperature(1.5);
  request.mutable_sampling()->set_seed(5);
  request.mutable_sampling()->set_num_replies(3);
  request.mutable_sampling()->set_ignores_end_token(true);
  const auto whole = Ask(request);
  ASSERT_TRUE(whole.ok()) << whole.status();
  // The end of the second reply's first ten tokens' text, or more.
  const std::string stop = whole->content.at(1).substr(0, 12);
  request.mutable_sampling()->add_stop_strings(stop);
  const auto cut = Ask(request);
  // A cut inside a character is refused, which is fine as well.
  if (absl::IsInvalidArgument(cut.status())) GTEST_SKIP() << cut.status();
  ASSERT_TRUE(cut.ok()) << cut.status();
  EXPECT_EQ(cut->outcome.ends[1].stop_string(), stop);
  for (const uint32_t other : {0u, 2u}) {
    if (whole->content.at(other).find(stop) != std::string::npos) continue;
    EXPECT_EQ(cut->tokens.at(other), whole->tokens.at(other));
  }
  ExpectAllFree();
}

TEST_F(SamplingTest, LogprobsAreThoseOfADistribution) {
  v1::GenerateRequest request = RequestOf(150, 10);
  request.mutable_sampling()->set_top_logprobs(20);
  request.mutable_sampling()->set_top_prompt_logprobs(2);
  const auto replies = Ask(request);
  ASSERT_TRUE(replies.ok()) << replies.status() << cluster_->Logs();
  const std::vector<v1::TokenLogprobs>& logprobs = replies->logprobs.at(0);
  ASSERT_EQ(logprobs.size(), replies->tokens.at(0).size());
  for (size_t i = 0; i < logprobs.size(); ++i) {
    EXPECT_EQ(logprobs[i].chosen().token_id(), replies->tokens.at(0)[i]);
    EXPECT_EQ(logprobs[i].rank(), 1);  // Greedy.
    ASSERT_EQ(logprobs[i].top_size(), 20);
    EXPECT_EQ(logprobs[i].top(0).token_id(), logprobs[i].chosen().token_id());
    double sum = 0;
    for (const v1::TokenLogprob& one : logprobs[i].top()) sum += std::exp(double{one.logprob()});
    EXPECT_LE(sum, 1.0 + 1e-6);
    for (int k = 1; k < 20; ++k) {
      EXPECT_LE(logprobs[i].top(k).logprob(), logprobs[i].top(k - 1).logprob());
    }
  }
  ASSERT_EQ(replies->outcome.prompt_logprobs.size(), 149u);
  for (size_t i = 0; i < 149; ++i) {
    EXPECT_EQ(replies->outcome.prompt_logprobs[i].chosen().token_id(),
              request.token_ids().ids(static_cast<int>(i) + 1));
    EXPECT_EQ(replies->outcome.prompt_logprobs[i].top_size(), 2);
  }
}

TEST_F(SamplingTest, BannedAndBiasedTokensChangeTheReply) {
  v1::GenerateRequest request = RequestOf(40, 10);
  const auto plain = Ask(request);
  ASSERT_TRUE(plain.ok()) << plain.status();
  const uint32_t first = plain->tokens.at(0)[0];
  request.mutable_sampling()->add_banned_token_ids(first);
  const auto banned = Ask(request);
  ASSERT_TRUE(banned.ok()) << banned.status();
  for (const uint32_t token : banned->tokens.at(0)) EXPECT_NE(token, first);
  request.mutable_sampling()->clear_banned_token_ids();
  (*request.mutable_sampling()->mutable_logit_bias())[700] = 100;
  request.mutable_sampling()->add_stop_token_ids(700);
  request.mutable_sampling()->set_min_output_tokens(2);
  const auto biased = Ask(request);
  ASSERT_TRUE(biased.ok()) << biased.status();
  EXPECT_EQ(biased->tokens.at(0).size(), 2u);
  EXPECT_NE(biased->tokens.at(0)[0], 700);
  EXPECT_EQ(biased->tokens.at(0)[1], 700);
  EXPECT_EQ(biased->outcome.ends[0].stop_token_id(), 700);
}

TEST_F(SamplingTest, BadParametersAreRefusedByName) {
  using Params = v1::SamplingParams;
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<std::pair<std::string, std::function<void(Params&)>>> table = {
      {"sampling.temperature", [](Params& p) { p.set_temperature(kNan); }},
      {"sampling.top_p", [](Params& p) { p.set_top_p(-1); }},
      {"sampling.top_k", [](Params& p) { p.set_top_k(4000000000u); }},
      {"sampling.min_p", [](Params& p) { p.set_min_p(2); }},
      {"sampling.repetition_penalty", [](Params& p) { p.set_repetition_penalty(0); }},
      {"sampling.frequency_penalty", [](Params& p) { p.set_frequency_penalty(1e9); }},
      {"sampling.presence_penalty", [](Params& p) { p.set_presence_penalty(kNan); }},
      {"sampling.logit_bias[5]", [](Params& p) { (*p.mutable_logit_bias())[5] = kNan; }},
      {"sampling.banned_token_ids", [](Params& p) { p.add_banned_token_ids(1u << 30); }},
      {"sampling.stop_strings[0]", [](Params& p) { p.add_stop_strings("\xff"); }},
      {"sampling.stop_token_ids", [](Params& p) { p.add_stop_token_ids(1u << 30); }},
      {"sampling.max_output_tokens", [](Params& p) { p.set_max_output_tokens(0); }},
      {"sampling.min_output_tokens", [](Params& p) { p.set_min_output_tokens(11); }},
      {"sampling.num_replies", [](Params& p) { p.set_num_replies(17); }},
      {"sampling.top_logprobs", [](Params& p) { p.set_top_logprobs(21); }},
      {"sampling.top_prompt_logprobs", [](Params& p) { p.set_top_prompt_logprobs(21); }},
  };
  for (const auto& [field, spoil] : table) {
    v1::GenerateRequest request = RequestOf(20, 10);
    spoil(*request.mutable_sampling());
    const absl::Status status = Ask(request).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  }
  // More than the worker has slots for: the worker says so, and nobody waits.
  v1::GenerateRequest many = RequestOf(20, 10);
  many.mutable_sampling()->set_num_replies(11);
  const absl::Status status = Ask(many).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("num_replies: is 11, want at most 10"));
}

}  // namespace
}  // namespace isthmus::testing
