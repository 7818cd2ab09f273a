// SPDX-License-Identifier: Apache-2.0
#include "services/worker/decode_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/fault.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

using testing::HasSubstr;

int64_t QuarantinedPages(const WorkerPair& pair) {
  v1::WorkerLoad load;
  pair.decode_service->AddLoad(&load);
  return static_cast<int64_t>(load.quarantined_pages());
}

TEST(DecodeServiceTest, AStepsTokensTravelInOneMessage) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_max_tokens_per_step = 4;
  WorkerPair pair(config, config);
  const TestRequest request = RequestOf(200, 100);
  const TestReply reply = pair.Run(request);
  EXPECT_EQ(reply.tokens, pair.Expected(request));
  EXPECT_EQ(reply.digests.size(), 100u);
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH);
  EXPECT_LT(reply.num_messages, 60);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
}

TEST(DecodeServiceTest, AReplyOfOneTokenEndsWithItsHandoff) {
  WorkerPair pair;
  const TestRequest request = RequestOf(50, 1);
  const TestReply reply = pair.Run(request);
  EXPECT_EQ(reply.tokens, pair.Expected(request));
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH);
  EXPECT_EQ(reply.num_messages, 1);
}

TEST(DecodeServiceTest, PagesOfAWriterThatIsNotDoneWaitForLeaseAndQuarantine) {
  SimulatedClock clock;
  WorkerPair pair(ScriptedConfig(), ScriptedConfig(), clock);
  const TestRequest request = RequestOf(300);
  ASSERT_TRUE(pair.Reserve(request).ok());
  clock.Sleep(absl::Seconds(20));
  const auto reply =
      pair.decode_service->Cancel(WorkerPair::CancelOf(request, false), absl::Seconds(1));
  ASSERT_TRUE(reply.ok());
  EXPECT_TRUE(reply->was_known());
  EXPECT_EQ(pair.decode_service->num_transfers(), 0);
  EXPECT_EQ(QuarantinedPages(pair), 9);  // 306 tokens in pages of 128, of three kinds.
  clock.Sleep(absl::Seconds(159));       // The lease of two minutes, and one from its end on.
  pair.decode_service->Sweep();
  EXPECT_EQ(QuarantinedPages(pair), 9);
  clock.Sleep(absl::Seconds(1));
  pair.decode_service->Sweep();
  EXPECT_EQ(QuarantinedPages(pair), 0);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
}

TEST(DecodeServiceTest, WhenTheWriterIsDoneTheQuarantineEnds) {
  WorkerPair pair;
  const TestRequest request = RequestOf(300);
  ASSERT_TRUE(pair.Reserve(request).ok());
  ASSERT_TRUE(
      pair.decode_service->Cancel(WorkerPair::CancelOf(request, false), absl::Seconds(1)).ok());
  EXPECT_EQ(QuarantinedPages(pair), 9);
  const auto again =
      pair.decode_service->Cancel(WorkerPair::CancelOf(request, true), absl::Seconds(1));
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->was_known());
  EXPECT_EQ(QuarantinedPages(pair), 0);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
  // The id is used up, in whatever order calls arrive.
  EXPECT_EQ(pair.Reserve(request).status().code(), absl::StatusCode::kAborted);
}

TEST(DecodeServiceTest, TheServiceItselfTakesBackWhatHasExpired) {
  WorkerConfig brief = ScriptedConfig();
  brief.reservation_lease = absl::Milliseconds(100);
  brief.transfer_timeout = absl::Milliseconds(50);
  brief.quarantine_time = absl::Milliseconds(100);
  WorkerPair pair(brief, brief);
  ASSERT_TRUE(pair.Reserve(RequestOf(300)).ok());
  EXPECT_FALSE(WorkerPair::IsAllFree(*pair.decode));
  EXPECT_TRUE(ComesTrue([&] { return QuarantinedPages(pair) == 9; }));
  EXPECT_TRUE(ComesTrue([&] { return WorkerPair::IsAllFree(*pair.decode); }));
}

TEST(DecodeServiceTest, ARouterThatDoesNotReadLosesItsOwnSequencesAlone) {
  WorkerConfig config = ScriptedConfig();
  config.max_unread_messages = 5;
  WorkerPair pair(config, config);
  TestRequest unread = RequestOf(100, 1000);
  unread.router = 0x99;
  const std::shared_ptr<TokenQueue> unread_queue = pair.OpenStream(unread.router);
  std::vector<TestReply> replies = {*pair.Begin(unread)};
  ASSERT_TRUE(ComesTrue([&] { return pair.decode_service->num_transfers() == 0; }));
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
  const TestRequest other = RequestOf(100, 4, 50);
  EXPECT_EQ(pair.Run(other).tokens, pair.Expected(other));
  while (replies[0].end == v1::SEQUENCE_END_UNSPECIFIED) {
    ASSERT_TRUE(WorkerPair::Read(*unread_queue, {unread}, replies));
  }
  EXPECT_EQ(replies[0].num_messages, 6);
  EXPECT_EQ(replies[0].end, v1::SEQUENCE_END_FAILED);
  EXPECT_EQ(replies[0].error.code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
}

TEST(DecodeServiceTest, AnotherStreamOfARouterReplacesItsOldOne) {
  WorkerPair pair;
  const TestRequest request = RequestOf(300);
  ASSERT_TRUE(pair.Reserve(request).ok());
  const std::shared_ptr<TokenQueue> old_stream = pair.tokens;
  pair.tokens = pair.OpenStream(kTestRouter);
  EXPECT_TRUE(old_stream->is_closed());
  EXPECT_EQ(pair.decode_service->num_transfers(), 0);
  EXPECT_EQ(QuarantinedPages(pair), 9);
  pair.decode_service->CloseStream(kTestRouter, old_stream);  // Its thread notices late.
  const TestRequest another = RequestOf(200);
  EXPECT_EQ(pair.Run(another).tokens, pair.Expected(another));
}

TEST(DecodeServiceTest, DrainingRefusesReservationsAndFinishesTheRest) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_step_time = absl::Milliseconds(2);
  WorkerPair pair(config, config);
  const TestRequest reserved = RequestOf(100, 5, 3);
  const auto reservation = pair.Reserve(reserved);
  ASSERT_TRUE(reservation.ok());
  const TestRequest running = RequestOf(100, 50);
  std::vector<TestReply> replies = {*pair.Begin(running), {}};
  pair.decode_service->Drain();
  const absl::Status refused = pair.Reserve(RequestOf(10)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FaultScopeOf(refused), FaultScope::kPeer);
  const auto handoff = pair.Prefill(reserved, *reservation);
  ASSERT_TRUE(handoff.ok()) << handoff.status();
  EXPECT_TRUE(pair.Handoff(reserved, *handoff).ok());
  replies[1].tokens.push_back(static_cast<int32_t>(handoff->first_tokens(0).token_id()));
  EXPECT_EQ(pair.decode_service->AwaitIdle(absl::Seconds(30)), 0);
  while (replies[0].end == v1::SEQUENCE_END_UNSPECIFIED ||
         replies[1].end == v1::SEQUENCE_END_UNSPECIFIED) {
    ASSERT_TRUE(WorkerPair::Read(*pair.tokens, {running, reserved}, replies));
  }
  EXPECT_EQ(replies[0].tokens, pair.Expected(running));
  EXPECT_EQ(replies[1].tokens, pair.Expected(reserved));
}

TEST(DecodeServiceTest, WhatRunsWhenTheWorkerStopsEndsWithAReason) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_step_time = absl::Milliseconds(2);
  WorkerPair pair(config, config);
  const TestRequest request = RequestOf(100, 5000);
  std::vector<TestReply> replies = {*pair.Begin(request)};
  pair.decode->StopSteps();
  pair.decode_service->Stop();
  while (WorkerPair::Read(*pair.tokens, {request}, replies)) {
  }
  EXPECT_EQ(replies[0].end, v1::SEQUENCE_END_FAILED);
  EXPECT_EQ(replies[0].error.code(), static_cast<int>(absl::StatusCode::kUnavailable));
  EXPECT_THAT(replies[0].error.text(), HasSubstr("stopping"));
  EXPECT_EQ(replies[0].error.fault_scope(), "peer");
}

TEST(DecodeServiceTest, AReplyOfFullLengthNeverNeedsMoreThanItsReservation) {
  WorkerConfig config = ScriptedConfig();
  config.scripted_max_tokens_per_step = 4;
  config.cache_tokens = 512;
  WorkerPair pair(config, config);
  // All pages of the pool, to the last token.
  const TestRequest request = RequestOf(200, 312);
  const TestReply reply = pair.Run(request);
  EXPECT_EQ(reply.tokens, pair.Expected(request));
  EXPECT_EQ(reply.end, v1::SEQUENCE_END_LENGTH);
}

}  // namespace
}  // namespace isthmus::worker
