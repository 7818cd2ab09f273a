// SPDX-License-Identifier: Apache-2.0
// Several replies to one prompt, and what is told about tokens, through both workers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "services/base/reply_seed.h"
#include "services/rpc/identity.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

using testing::HasSubstr;

// What came of one transfer, by reply.
struct Replies {
  std::vector<TestReply> all;
  std::vector<std::vector<v1::TokenLogprobs>> logprobs;
  v1::PrefillReply prefill;
};

// Up to the running sequences.
Replies BeginAll(WorkerPair& pair, const TestRequest& request) {
  Replies replies;
  const auto reservation = pair.Reserve(request);
  EXPECT_TRUE(reservation.ok()) << reservation.status();
  if (!reservation.ok()) return replies;
  const auto prefill = pair.prefill_service->Prefill(pair.PrefillCall(request, *reservation),
                                                     {RealClock().Now() + absl::Seconds(60), {}});
  EXPECT_TRUE(prefill.ok()) << prefill.status();
  if (!prefill.ok()) return replies;
  replies.prefill = *prefill;
  const auto admitted = pair.Handoff(request, prefill->handoff());
  EXPECT_TRUE(admitted.ok()) << admitted.status();
  for (const v1::FirstToken& first : prefill->handoff().first_tokens()) {
    TestReply& reply = replies.all.emplace_back();
    reply.tokens.push_back(static_cast<int32_t>(first.token_id()));
    reply.digests.push_back(first.logits_crc32c());
    replies.logprobs.emplace_back();
    if (first.has_logprobs()) replies.logprobs.back().push_back(first.logprobs());
  }
  return replies;
}

// Reads one message. False: none came.
bool ReadOne(WorkerPair& pair, Replies& replies) {
  const auto message = pair.tokens->PopFor(absl::Seconds(60));
  if (!message.has_value()) return false;
  TestReply& reply = replies.all[message->reply_index()];
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_UNSPECIFIED);
  EXPECT_EQ(message->first_index(), reply.tokens.size());
  reply.tokens.insert(reply.tokens.end(), message->token_ids().begin(), message->token_ids().end());
  reply.digests.insert(reply.digests.end(), message->logits_crc32c().begin(),
                       message->logits_crc32c().end());
  std::vector<v1::TokenLogprobs>& logprobs = replies.logprobs[message->reply_index()];
  logprobs.insert(logprobs.end(), message->logprobs().begin(), message->logprobs().end());
  reply.end = message->end();
  reply.error = message->error();
  return true;
}

bool IsOpen(const Replies& replies) {
  return std::ranges::any_of(replies.all, [](const TestReply& reply) {
    return reply.end == v1::SEQUENCE_END_UNSPECIFIED;
  });
}

Replies RunAll(WorkerPair& pair, const TestRequest& request) {
  Replies replies = BeginAll(pair, request);
  while (IsOpen(replies) && ReadOne(pair, replies)) {
  }
  return replies;
}

// Prompts that end before, at and behind the end of a page; sampled, so that replies differ.
TEST(ReplyServicesTest, EachReplyIsWhatARequestWithItsSeedGetsAlone) {
  WorkerPair pair(TinyModelConfig(), TinyModelConfig());
  for (const size_t length : {size_t{20}, size_t{256}, size_t{300}}) {
    TestRequest request = RequestOf(length, 12);
    request.sampling.set_temperature(1.5);
    request.sampling.set_seed(9);
    request.sampling.set_num_replies(4);
    const Replies together = RunAll(pair, request);
    ASSERT_EQ(together.all.size(), 4u);
    EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
    EXPECT_EQ(pair.decode_service->num_transfers(), 0);
    bool is_varied = false;
    for (uint32_t i = 0; i < 4; ++i) {
      TestRequest single = RequestOf(length, 12);
      single.sampling.set_temperature(1.5);
      single.sampling.set_seed(ReplySeed(9, i));
      const TestReply alone = pair.Run(single);
      EXPECT_EQ(together.all[i].tokens, alone.tokens) << length << " tokens, reply " << i;
      EXPECT_EQ(together.all[i].digests, alone.digests) << length << " tokens, reply " << i;
      EXPECT_EQ(together.all[i].end, alone.end);
      is_varied = is_varied || together.all[i].tokens != together.all[0].tokens;
    }
    EXPECT_TRUE(is_varied);
  }
}

// The scripted model checks every byte that it reads: a page that two replies write would not pass.
TEST(ReplyServicesTest, RepliesDoNotWriteIntoEachOthersPages) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_max_tokens_per_step = 4;
  WorkerPair pair(config, config);
  for (const size_t length : {size_t{1}, size_t{127}, size_t{128}, size_t{129}, size_t{400}}) {
    TestRequest request = RequestOf(length, 150);
    request.sampling.set_num_replies(3);
    const Replies together = RunAll(pair, request);
    ASSERT_EQ(together.all.size(), 3u);
    for (const TestReply& reply : together.all) {
      EXPECT_EQ(reply.tokens, pair.Expected(request)) << length;
      EXPECT_NE(reply.end, v1::SEQUENCE_END_FAILED) << reply.error.text();
    }
    EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
  }
}

TEST(ReplyServicesTest, OneReplyCanBeEndedAlone) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_step_time = absl::Milliseconds(1);
  WorkerPair pair(config, config);
  TestRequest request = RequestOf(140, 300);
  request.sampling.set_num_replies(3);
  Replies replies = BeginAll(pair, request);
  ASSERT_EQ(replies.all.size(), 3u);
  v1::CancelCall cancel = WorkerPair::CancelOf(request, true);
  cancel.set_reply_index(1);
  const auto answer = pair.decode_service->Cancel(cancel, absl::Seconds(60));
  ASSERT_TRUE(answer.ok()) << answer.status();
  EXPECT_TRUE(answer->was_known());
  EXPECT_EQ(pair.decode_service->num_transfers(), 1);
  // A second time, of one that there is not, and of a transfer that there is not.
  EXPECT_FALSE(pair.decode_service->Cancel(cancel, absl::Seconds(60))->was_known());
  cancel.set_reply_index(7);
  EXPECT_FALSE(pair.decode_service->Cancel(cancel, absl::Seconds(60))->was_known());
  while (IsOpen(replies) && ReadOne(pair, replies)) {
  }
  EXPECT_EQ(replies.all[0].tokens, pair.Expected(request));
  EXPECT_EQ(replies.all[2].tokens, pair.Expected(request));
  EXPECT_EQ(replies.all[1].end, v1::SEQUENCE_END_FAILED);
  EXPECT_LT(replies.all[1].tokens.size(), 300u);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
  EXPECT_FALSE(pair.decode_service->Cancel(cancel, absl::Seconds(60))->was_known());
}

TEST(ReplyServicesTest, CancellingTheTransferEndsAllReplies) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_step_time = absl::Milliseconds(1);
  WorkerPair pair(config, config);
  TestRequest request = RequestOf(140, 300);
  request.sampling.set_num_replies(3);
  ASSERT_EQ(BeginAll(pair, request).all.size(), 3u);
  ASSERT_TRUE(
      pair.decode_service->Cancel(WorkerPair::CancelOf(request, true), absl::Seconds(60)).ok());
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
}

TEST(ReplyServicesTest, AReservationIsForAsManyRepliesAsItSays) {
  WorkerPair pair;
  TestRequest request = RequestOf(140);
  request.sampling.set_num_replies(9);
  const absl::Status refused = pair.Reserve(request).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("num_replies: is 9, want at most 8"));
  // Of 64 pages of 128 tokens each reply may want 20.
  TestRequest large = RequestOf(140, 2400);
  large.sampling.set_num_replies(4);
  const absl::Status too_large = pair.Reserve(large).status();
  EXPECT_EQ(too_large.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_large.message()), HasSubstr("4 replies of up to 2400 tokens want"));
  request.sampling.set_num_replies(2);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  request.sampling.set_num_replies(3);
  const auto handoff = pair.Prefill(request, *reservation);
  ASSERT_TRUE(handoff.ok()) << handoff.status();
  const absl::Status differs = pair.Handoff(request, *handoff).status();
  EXPECT_EQ(differs.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(differs.message()), HasSubstr("num_replies: 2 are reserved"));
}

TEST(ReplyServicesTest, LogprobsAreOneForEachTokenAndSumToAtMostOne) {
  WorkerPair pair(TinyModelConfig(), TinyModelConfig());
  TestRequest request = RequestOf(30, 8);
  request.sampling.set_top_logprobs(5);
  const Replies greedy = RunAll(pair, request);
  ASSERT_EQ(greedy.all.size(), 1u);
  ASSERT_EQ(greedy.logprobs[0].size(), greedy.all[0].tokens.size());
  for (size_t i = 0; i < greedy.logprobs[0].size(); ++i) {
    const v1::TokenLogprobs& one = greedy.logprobs[0][i];
    EXPECT_EQ(static_cast<int32_t>(one.chosen().token_id()), greedy.all[0].tokens[i]);
    EXPECT_EQ(one.rank(), 1);
    ASSERT_EQ(one.top_size(), 5);
    EXPECT_EQ(one.top(0).token_id(), one.chosen().token_id());
    double sum = 0;
    for (const v1::TokenLogprob& top : one.top()) sum += std::exp(double{top.logprob()});
    EXPECT_GT(sum, 0);
    EXPECT_LE(sum, 1.0 + 1e-6);
  }
}

// The log probabilities of a prompt are those that its tokens have as output: a prompt and its
// reply, asked for as a prompt, say the same.
TEST(ReplyServicesTest, PromptLogprobsAreThoseOfTheSameTokensAsOutput) {
  WorkerConfig narrow = TinyModelConfig();
  narrow.chunk_tokens = 24;
  WorkerPair pair(TinyModelConfig(), TinyModelConfig());
  WorkerPair chunked(narrow, narrow);
  TestRequest request = RequestOf(90, 8);
  request.sampling.set_temperature(1.0);
  request.sampling.set_top_logprobs(3);
  const Replies output = RunAll(pair, request);
  ASSERT_EQ(output.all.size(), 1u);
  TestRequest again = request;
  again.transfer_id = rpc::NewTransferId();
  for (const int32_t token : output.all[0].tokens) {
    again.prompt.push_back(static_cast<uint32_t>(token));
  }
  again.max_output_tokens = 1;
  again.sampling.set_top_prompt_logprobs(3);
  const Replies prompt = RunAll(pair, again);
  again.transfer_id = rpc::NewTransferId();
  const Replies in_chunks = RunAll(chunked, again);
  ASSERT_EQ(prompt.prefill.prompt_logprobs_size(), static_cast<int>(again.prompt.size()) - 1);
  ASSERT_EQ(in_chunks.prefill.prompt_logprobs_size(), prompt.prefill.prompt_logprobs_size());
  for (int i = 0; i < prompt.prefill.prompt_logprobs_size(); ++i) {
    const v1::TokenLogprobs& one = prompt.prefill.prompt_logprobs(i);
    EXPECT_EQ(one.SerializeAsString(), in_chunks.prefill.prompt_logprobs(i).SerializeAsString());
    EXPECT_EQ(one.chosen().token_id(), again.prompt[static_cast<size_t>(i) + 1]);
    if (i + 1 < 90) continue;
    const v1::TokenLogprobs& drawn = output.logprobs[0][static_cast<size_t>(i) + 1 - 90];
    EXPECT_EQ(one.SerializeAsString(), drawn.SerializeAsString()) << i;
  }
}

TEST(ReplyServicesTest, AStopTokenEndsTheReplyInTheMiddleOfAStep) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_max_tokens_per_step = 4;
  WorkerPair pair(config, config);
  TestRequest request = RequestOf(50, 40);
  const std::vector<int32_t> whole = pair.Expected(request);
  for (size_t place = 0; place < whole.size(); ++place) {
    request.transfer_id = rpc::NewTransferId();
    request.sampling.clear_stop_token_ids();
    request.sampling.add_stop_token_ids(static_cast<uint32_t>(whole[place]));
    const auto first = std::find(whole.begin(), whole.end(), whole[place]);
    const TestReply reply = pair.Run(request);
    EXPECT_EQ(reply.tokens, std::vector<int32_t>(whole.begin(), first + 1));
    EXPECT_EQ(reply.digests.size(), reply.tokens.size());
    EXPECT_EQ(reply.end, v1::SEQUENCE_END_STOP);
  }
}

TEST(ReplyServicesTest, TheFirstTokenMayHaveToGoOn) {
  WorkerPair pair;
  TestRequest request = RequestOf(50, 12);
  request.sampling.set_min_output_tokens(5);
  EXPECT_EQ(pair.Run(request).tokens, pair.Expected(request));
}

}  // namespace
}  // namespace isthmus::worker
