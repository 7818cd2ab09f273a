// SPDX-License-Identifier: Apache-2.0
// A decode worker whose pool is too small for what it runs: nobody outside sees more than time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

// Four pages of each kind at the decode worker, which expects replies to be short.
WorkerConfig SmallConfig() {
  WorkerConfig config = ScriptedConfig();
  config.cache_tokens = 4 * 128;
  config.first_output_share = 0;
  config.scripted_step_time = absl::Milliseconds(2);
  config.scripted_max_tokens_per_step = 2;
  return config;
}

WorkerConfig AmpleConfig() {
  WorkerConfig config = ScriptedConfig();
  config.scripted_max_tokens_per_step = 2;
  return config;
}

class DecodePressureTest : public testing::Test {
 protected:
  // Begins so many requests, each of one page now and three in the end. All are reserved before the
  // first one runs.
  void BeginAll(size_t count, uint32_t max_output_tokens = 250,
                v1::Priority priority = v1::PRIORITY_UNSPECIFIED) {
    std::vector<v1::KvReservation> reservations;
    for (size_t i = 0; i < count; ++i) {
      requests.push_back(RequestOf(100, max_output_tokens, static_cast<uint32_t>(10 + i)));
      requests.back().priority = priority;
      auto reservation = pair.Reserve(requests.back());
      ASSERT_TRUE(reservation.ok()) << reservation.status();
      reservations.push_back(*std::move(reservation));
    }
    for (size_t i = 0; i < count; ++i) {
      const auto handoff = pair.Prefill(requests[i], reservations[i]);
      ASSERT_TRUE(handoff.ok()) << handoff.status();
      const auto admitted = pair.Handoff(requests[i], *handoff);
      ASSERT_TRUE(admitted.ok()) << admitted.status();
      replies.emplace_back();
      replies.back().tokens.push_back(static_cast<int32_t>(handoff->first_tokens(0).token_id()));
      replies.back().digests.push_back(handoff->first_tokens(0).logits_crc32c());
    }
  }
  bool AllHaveEnded() const {
    return std::ranges::all_of(
        replies, [](const TestReply& r) { return r.end != v1::SEQUENCE_END_UNSPECIFIED; });
  }
  void ReadAll() {
    while (!AllHaveEnded()) ASSERT_TRUE(WorkerPair::Read(*pair.tokens, requests, replies));
  }
  void AwaitPreemption() {
    ASSERT_TRUE(ComesTrue([this] { return pair.decode->loop().num_preempted() > 0; }));
  }

  WorkerPair pair{AmpleConfig(), SmallConfig()};
  std::vector<TestRequest> requests;
  std::vector<TestReply> replies;
};

TEST_F(DecodePressureTest, RepliesAreWholeThoughTheirPagesWereTakenAway) {
  BeginAll(4);
  ReadAll();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(replies[i].tokens, pair.Expected(requests[i]));
    EXPECT_EQ(replies[i].end, v1::SEQUENCE_END_LENGTH);
    EXPECT_EQ(replies[i].digests.size(), replies[i].tokens.size());
  }
  EXPECT_GT(pair.decode->loop().num_preemptions(), 0);
  EXPECT_TRUE(ComesTrue([&] { return WorkerPair::IsAllFree(*pair.decode); }));
}

TEST_F(DecodePressureTest, WhatWasPreemptedGoesBeforeNewcomersOfItsClass) {
  BeginAll(4);
  AwaitPreemption();
  const absl::Status refused = pair.Reserve(RequestOf(10, 2)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), testing::HasSubstr("preempted"));
  ReadAll();
  EXPECT_TRUE(ComesTrue([&] { return pair.Reserve(RequestOf(10, 2)).ok(); }));
}

TEST_F(DecodePressureTest, ACancelFindsASequenceThatIsPreempted) {
  BeginAll(4);
  AwaitPreemption();
  for (const TestRequest& request : requests) {
    const auto reply =
        pair.decode_service->Cancel(WorkerPair::CancelOf(request, true), absl::Seconds(10));
    EXPECT_TRUE(reply.ok()) << reply.status();
  }
  EXPECT_EQ(pair.decode_service->num_transfers(), 0);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
  EXPECT_EQ(pair.decode->loop().num_sequences(), 0);
}

TEST_F(DecodePressureTest, TheEndOfTheStreamEndsASequenceThatIsPreempted) {
  BeginAll(4);
  AwaitPreemption();
  pair.decode_service->CloseStream(kTestRouter, pair.tokens);
  EXPECT_TRUE(ComesTrue([&] { return pair.decode_service->num_transfers() == 0; }));
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
}

TEST_F(DecodePressureTest, WhatIsPreemptedWhenTheWorkerStopsEndsOnce) {
  BeginAll(4);
  AwaitPreemption();
  pair.decode->StopSteps();
  pair.decode_service->Stop();
  while (WorkerPair::Read(*pair.tokens, requests, replies)) {
  }
  for (const TestReply& reply : replies) EXPECT_EQ(reply.end, v1::SEQUENCE_END_FAILED);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.decode));
}

TEST_F(DecodePressureTest, DrainingWaitsForWhatIsPreempted) {
  BeginAll(4);
  AwaitPreemption();
  pair.decode_service->Drain();
  EXPECT_EQ(pair.decode_service->AwaitIdle(absl::Seconds(30)), 0);
  ReadAll();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(replies[i].tokens, pair.Expected(requests[i]));
  }
}

// A reservation holds the last pages and its writer takes its time: the reply that needs one waits,
// keeps what it has, and goes on when the reservation is gone.
TEST_F(DecodePressureTest, AReplyWaitsForPagesThatAReservationHolds) {
  BeginAll(1, 200);
  const TestRequest reserved = RequestOf(300, 1, 99);
  ASSERT_TRUE(pair.Reserve(reserved).ok());
  EXPECT_TRUE(ComesTrue([this] {
    return pair.decode->pool().pages(kernels::kCsaKv).num_available() == 0 &&
           pair.tokens->size() > 0;
  }));
  RealClock().Sleep(absl::Milliseconds(100));
  EXPECT_TRUE(pair.decode->is_live());
  EXPECT_EQ(pair.decode->loop().num_preemptions(), 0);
  EXPECT_TRUE(
      pair.decode_service->Cancel(WorkerPair::CancelOf(reserved, true), absl::Seconds(1)).ok());
  ReadAll();
  EXPECT_EQ(replies[0].tokens, pair.Expected(requests[0]));
}

TEST_F(DecodePressureTest, AnUrgentReservationIsNotKeptBackByWhatIsPreempted) {
  BeginAll(4, 250);
  AwaitPreemption();
  TestRequest urgent = RequestOf(10, 2);
  urgent.priority = v1::PRIORITY_HIGH;
  // Only what runs counts for it.
  EXPECT_TRUE(ComesTrue([&] { return pair.Reserve(urgent).ok(); }));
  ReadAll();
}

// Three of four pages are held, and none comes back by itself for 200 tokens.
TEST_F(DecodePressureTest, RepliesOfALowerClassGiveWayToANewcomerThatMayPreempt) {
  BeginAll(3, 200, v1::PRIORITY_LOW);
  TestRequest urgent = RequestOf(300, 20, 99);
  urgent.request_id = "urgent";
  EXPECT_FALSE(pair.Reserve(urgent).ok());
  urgent.priority = v1::PRIORITY_HIGH;
  EXPECT_FALSE(pair.Reserve(urgent).ok());
  urgent.may_preempt = true;
  EXPECT_EQ(pair.Reserve(urgent).status().code(), absl::StatusCode::kResourceExhausted);
  absl::StatusOr<v1::KvReservation> reservation = absl::UnknownError("not asked yet");
  ASSERT_TRUE(ComesTrue([&] {
    reservation = pair.Reserve(urgent);
    return reservation.ok();
  })) << reservation.status();
  EXPECT_GE(pair.decode->loop().num_preemptions(), 2);
  EXPECT_TRUE(std::ranges::any_of(
      replies, [](const TestReply& reply) { return reply.end == v1::SEQUENCE_END_UNSPECIFIED; }));
  requests.push_back(urgent);
  const auto handoff = pair.Prefill(urgent, *reservation);
  ASSERT_TRUE(handoff.ok()) << handoff.status();
  ASSERT_TRUE(pair.Handoff(urgent, *handoff).ok());
  replies.emplace_back();
  replies.back().tokens.push_back(static_cast<int32_t>(handoff->first_tokens(0).token_id()));
  ReadAll();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(replies[i].tokens, pair.Expected(requests[i])) << i;
  }
}

}  // namespace
}  // namespace isthmus::worker
