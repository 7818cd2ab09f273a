// SPDX-License-Identifier: Apache-2.0
// A decode worker whose pool is too small for what it runs: nobody outside sees more than time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

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
TEST_F(DecodePressureTest, RepliesOfALowerClassGiveWayToANewcomerThatAsks) {
  BeginAll(3, 200, v1::PRIORITY_LOW);
  TestRequest urgent = RequestOf(300, 20, 99);
  urgent.request_id = "urgent";
  EXPECT_FALSE(pair.Reserve(urgent).ok());
  urgent.priority = v1::PRIORITY_HIGH;
  EXPECT_FALSE(pair.Reserve(urgent).ok());
  urgent.ask_id = 7;
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

TestRequest Urgent(size_t num_tokens) {
  TestRequest urgent = RequestOf(num_tokens, 20, 99);
  urgent.priority = v1::PRIORITY_HIGH;
  urgent.ask_id = 7;
  return urgent;
}

// The same with steps of a whole 50 ms.
class SlowPressureTest : public testing::Test {
 protected:
  static WorkerConfig SlowConfig() {
    WorkerConfig config = SmallConfig();
    config.cache_tokens = 8 * 128;
    config.prefix_snapshots = 4;
    config.scripted_step_time = absl::Milliseconds(50);
    return config;
  }
  static TestRequest Low(size_t num_tokens, uint32_t max_output_tokens, uint32_t first) {
    TestRequest request = RequestOf(num_tokens, max_output_tokens, first);
    request.priority = v1::PRIORITY_LOW;
    return request;
  }
  // Until it has a reservation.
  absl::StatusOr<v1::KvReservation> KeepAsking(const TestRequest& request) {
    absl::StatusOr<v1::KvReservation> reservation = absl::UnknownError("not asked yet");
    ComesTrue([&] {
      RealClock().Sleep(absl::Milliseconds(20));
      reservation = pair.Reserve(request);
      return reservation.ok();
    });
    return reservation;
  }

  WorkerPair pair{AmpleConfig(), SlowConfig()};
};

// As soon as they run they give way.
TEST_F(SlowPressureTest, AnAskBeforeTheOthersRanIsNotTheLast) {
  std::vector<TestRequest> low;
  std::vector<v1::KvReservation> reservations;
  for (uint32_t i = 0; i < 7; ++i) {
    low.push_back(Low(100, 200, 10 + i));
    reservations.push_back(*pair.Reserve(low.back()));
  }
  EXPECT_FALSE(pair.Reserve(Urgent(300)).ok());
  for (size_t i = 0; i < low.size(); ++i) {
    const auto handoff = pair.Prefill(low[i], reservations[i]);
    ASSERT_TRUE(handoff.ok()) << handoff.status();
    ASSERT_TRUE(pair.Handoff(low[i], *handoff).ok());
  }
  const absl::Time start = RealClock().Now();
  EXPECT_TRUE(KeepAsking(Urgent(300)).ok());
  EXPECT_LE(RealClock().Now() - start, absl::Seconds(2));
}

// The next turn of a talk whose pages the worker has still: idle, so they are the request's own.
TEST_F(SlowPressureTest, OthersGiveWayToANewcomerWithAPrefixAsWell) {
  TestRequest talk = Urgent(384);
  talk.max_output_tokens = 2;
  pair.Run(talk);  // Its three pages are idle now.
  for (uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(pair.Begin(Low(20, 100, 10 + i)).ok());
  TestRequest next = talk;  // Two pages more than it has; one is free.
  for (uint32_t i = 0; i < 200; ++i) next.prompt.push_back(2 + i);
  next.transfer_id = rpc::NewTransferId();
  const absl::Time start = RealClock().Now();
  const auto reservation = KeepAsking(next);
  ASSERT_TRUE(reservation.ok()) << reservation.status();
  EXPECT_EQ(reservation->held_tokens(), 384u);
  EXPECT_LE(RealClock().Now() - start, absl::Seconds(1));
  EXPECT_GT(pair.decode->loop().num_preemptions(), 0);
}

// Urgent requests come, have their room, and leave again, all the time.
TEST_F(SlowPressureTest, WhoGivesWayComesToItsEndWhoeverComesAndGoes) {
  for (uint32_t i = 0; i < 7; ++i) ASSERT_TRUE(pair.Begin(Low(100, 12, 10 + i)).ok());
  uint64_t ask_id = 7;
  EXPECT_TRUE(ComesTrue([&] {
    TestRequest urgent = Urgent(900);
    urgent.ask_id = ask_id;
    if (pair.Reserve(urgent).ok()) {
      ++ask_id;
      EXPECT_TRUE(
          pair.decode_service->Cancel(WorkerPair::CancelOf(urgent, true), absl::Seconds(1)).ok());
    }
    RealClock().Sleep(absl::Milliseconds(10));
    return pair.decode->loop().num_sequences() == 0;
  }));
  EXPECT_GE(ask_id, 9u);
}

// It needs one of many, and calls come all the time while the loop looks for it.
TEST_F(SlowPressureTest, NoMoreGiveWayThanItTakes) {
  for (uint32_t i = 0; i < 7; ++i) ASSERT_TRUE(pair.Begin(Low(20, 100, 10 + i)).ok());
  int64_t worst = 0;
  int num_rounds = 0;
  const absl::Time end = RealClock().Now() + absl::Seconds(2);
  while (RealClock().Now() < end && pair.decode->loop().num_sequences() == 7) {
    const int64_t before = pair.decode->loop().num_preemptions();
    TestRequest urgent = Urgent(130);  // Two pages; one is free.
    urgent.ask_id += static_cast<uint64_t>(++num_rounds);
    std::atomic<bool> is_reserved = false;
    const auto hammer = [&] {
      while (!is_reserved && pair.decode->loop().num_sequences() == 7) {
        if (pair.Reserve(urgent).ok()) is_reserved = true;
      }
    };
    std::thread other(hammer);
    hammer();
    other.join();
    worst = std::max(worst, pair.decode->loop().num_preemptions() - before);
    (void)pair.decode_service->Cancel(WorkerPair::CancelOf(urgent, true), absl::Seconds(1));
    EXPECT_TRUE(ComesTrue([&] { return pair.decode->loop().num_preempted() == 0; }));
  }
  EXPECT_GE(num_rounds, 3);
  EXPECT_EQ(worst, 1);
}

}  // namespace
}  // namespace isthmus::worker
