// SPDX-License-Identifier: Apache-2.0
#include "services/worker/prefill_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/base/fault.h"
#include "services/worker/page_groups.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

using testing::HasSubstr;

// Steps that take real time, so that a test can look into the middle of a prompt.
WorkerConfig SlowConfig() {
  WorkerConfig config = ScriptedConfig();
  config.chunk_tokens = 64;
  config.scripted_step_time = absl::Milliseconds(3);
  return config;
}

// A Prefill call in a thread of its own.
class RunningPrefill {
 public:
  RunningPrefill(WorkerPair& pair, const TestRequest& request)
      : thread_(RealClock(), [this, &pair, request] {
          const auto reservation = pair.Reserve(request);
          result_ = reservation.ok() ? pair.Prefill(request, *reservation) : reservation.status();
        }) {}

  const absl::StatusOr<v1::KvHandoff>& Result() {
    thread_.Join();
    return result_;
  }

 private:
  absl::StatusOr<v1::KvHandoff> result_ = absl::UnknownError("still running");
  Thread thread_;
};

TEST(PrefillServiceTest, FullPagesAreWrittenBeforeThePromptIsComputed) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  struct Post {
    uint32_t region;
    uint64_t pending;
  };
  std::vector<Post> posts;
  pair.network.before_post = [&](const transfer::LoopbackWrite& write) {
    v1::WorkerLoad load;
    pair.prefill_service->AddLoad(&load);
    posts.push_back({write.span.region, load.pending_prompt_tokens()});
    return transfer::LoopbackFate{};
  };
  const TestRequest request = RequestOf(1000, 20);
  const TestReply reply = pair.Run(request);
  EXPECT_EQ(reply.tokens, pair.Expected(request));
  // 8 pages of each paged kind and the state slot, each once; the slot last.
  ASSERT_EQ(posts.size(), 25u);
  EXPECT_EQ(posts.back().region, kStateRegion);
  EXPECT_EQ(posts.back().pending, 0u);
  EXPECT_GT(posts.front().pending, 500u);
  const auto is_early = [](const Post& post) { return post.pending > 0; };
  EXPECT_GE(std::ranges::count_if(posts, is_early), 18);
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.prefill));
}

TEST(PrefillServiceTest, CancelFreesThePagesBeforeItAnswers) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  std::atomic<int> num_posts = 0;
  pair.network.before_post = [&](const transfer::LoopbackWrite&) {
    ++num_posts;
    return transfer::LoopbackFate{};
  };
  const TestRequest request = RequestOf(4000);
  RunningPrefill running(pair, request);
  ASSERT_TRUE(ComesTrue([&] { return num_posts > 0; }));
  const auto reply =
      pair.prefill_service->Cancel(WorkerPair::CancelOf(request, false), absl::Seconds(10));
  const int posts_then = num_posts;
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.prefill));
  EXPECT_EQ(pair.prefill_service->num_calls(), 0);
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_TRUE(reply->was_known());
  EXPECT_EQ(running.Result().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(num_posts, posts_then);
  EXPECT_LT(num_posts, 90);  // Not the whole prompt.
}

TEST(PrefillServiceTest, CancelWaitsForTheWriteThatIsUnderWay) {
  WorkerPair pair;
  pair.network.before_post = [&](const transfer::LoopbackWrite&) {
    return transfer::LoopbackFate{
        .latency = absl::Milliseconds(300), .is_lost = false, .error = {}};
  };
  const TestRequest request = RequestOf(300);
  RunningPrefill running(pair, request);
  ASSERT_TRUE(ComesTrue([&] { return pair.network.num_under_way() > 0; }));
  const auto hasty =
      pair.prefill_service->Cancel(WorkerPair::CancelOf(request, false), absl::Milliseconds(10));
  EXPECT_EQ(hasty.status().code(), absl::StatusCode::kDeadlineExceeded);
  const auto reply =
      pair.prefill_service->Cancel(WorkerPair::CancelOf(request, false), absl::Seconds(10));
  EXPECT_EQ(pair.network.num_under_way(), 0u);
  EXPECT_TRUE(reply.ok()) << reply.status();
}

TEST(PrefillServiceTest, AWriteThatMayStillLandIsAdmitted) {
  WorkerConfig hasty = ScriptedConfig();
  hasty.transfer_timeout = absl::Milliseconds(50);
  WorkerPair pair(hasty, ScriptedConfig());
  pair.network.before_post = [&](const transfer::LoopbackWrite&) {
    return transfer::LoopbackFate{.latency = {}, .is_lost = true, .error = {}};
  };
  const TestRequest request = RequestOf(300);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  const absl::Status status = pair.Prefill(request, *reservation).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kPeer);
  const auto reply =
      pair.prefill_service->Cancel(WorkerPair::CancelOf(request, false), absl::Seconds(10));
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("may still land"));
}

TEST(PrefillServiceTest, ATransferRunsOnceAndNotAfterItsCancel) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  const TestRequest request = RequestOf(1000);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  RunningPrefill running(pair, request);
  ASSERT_TRUE(ComesTrue([&] { return pair.prefill_service->num_calls() == 1; }));
  const absl::Status second = pair.Prefill(request, *reservation).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(second.message()), HasSubstr("is running"));
  EXPECT_TRUE(running.Result().ok()) << running.Result().status();
  const absl::Status third = pair.Prefill(request, *reservation).status();
  EXPECT_EQ(third.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(third.message()), HasSubstr("has ended here already"));

  const TestRequest late = RequestOf(100);
  const auto known =
      pair.prefill_service->Cancel(WorkerPair::CancelOf(late, false), absl::Seconds(1));
  ASSERT_TRUE(known.ok());
  EXPECT_FALSE(known->was_known());
  const auto late_reservation = pair.Reserve(late);
  ASSERT_TRUE(late_reservation.ok());
  EXPECT_EQ(pair.Prefill(late, *late_reservation).status().code(), absl::StatusCode::kAborted);
}

TEST(PrefillServiceTest, PromptsWaitTheirTurnForRoomUpToABound) {
  WorkerConfig narrow = SlowConfig();
  narrow.max_sequences = 2;
  narrow.max_queued_sequences = 3;
  WorkerPair pair(narrow, ScriptedConfig());
  std::vector<std::unique_ptr<RunningPrefill>> running;
  std::vector<TestRequest> requests;
  for (uint32_t i = 0; i < 5; ++i) {
    requests.push_back(RequestOf(400, 6, i));
    running.push_back(std::make_unique<RunningPrefill>(pair, requests.back()));
    const auto expected = static_cast<int64_t>(i) + 1;
    ASSERT_TRUE(ComesTrue([&] { return pair.prefill_service->num_calls() == expected; }));
    // Of the first two each has a slot before the next comes.
    const auto used = std::min<int32_t>(2, static_cast<int32_t>(i) + 1);
    ASSERT_TRUE(ComesTrue([&] { return pair.prefill->pool().slots().num_free() == 2 - used; }));
  }
  const TestRequest sixth = RequestOf(400, 6, 9);
  const auto reservation = pair.Reserve(sixth);
  ASSERT_TRUE(reservation.ok());
  const absl::Status refused = pair.Prefill(sixth, *reservation).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("all 3 places"));
  for (size_t i = 0; i < 5; ++i) {
    ASSERT_TRUE(running[i]->Result().ok()) << running[i]->Result().status();
    EXPECT_EQ(static_cast<int32_t>(running[i]->Result()->first_tokens(0).token_id()),
              pair.Expected(requests[i])[0]);
  }
}

TEST(PrefillServiceTest, TheMoreUrgentPromptHasTheNextRoom) {
  WorkerConfig narrow = SlowConfig();
  narrow.max_sequences = 1;
  WorkerPair pair(narrow, ScriptedConfig());
  RunningPrefill first(pair, RequestOf(600, 6, 1));
  ASSERT_TRUE(ComesTrue([&] { return pair.prefill->pool().slots().num_free() == 0; }));
  Mutex mutex;
  std::vector<v1::Priority> order;
  std::vector<Thread> waiting;
  int64_t num_calls = 1;
  for (const v1::Priority priority : {v1::PRIORITY_LOW, v1::PRIORITY_NORMAL, v1::PRIORITY_HIGH}) {
    waiting.emplace_back(RealClock(), [&, priority] {
      TestRequest request = RequestOf(300);
      request.priority = priority;
      const auto reservation = pair.Reserve(request);
      ASSERT_TRUE(reservation.ok()) << reservation.status();
      EXPECT_TRUE(pair.Prefill(request, *reservation).ok());
      MutexLock lock(mutex);
      order.push_back(priority);
    });
    ++num_calls;
    ASSERT_TRUE(ComesTrue([&] { return pair.prefill_service->num_calls() == num_calls; }));
  }
  EXPECT_TRUE(first.Result().ok());
  for (Thread& thread : waiting) thread.Join();
  EXPECT_EQ(order,
            (std::vector<v1::Priority>{v1::PRIORITY_HIGH, v1::PRIORITY_NORMAL, v1::PRIORITY_LOW}));
}

TEST(PrefillServiceTest, APromptThatNeverFitsIsRefusedAtOnce) {
  WorkerConfig small = ScriptedConfig();
  small.cache_tokens = 512;
  WorkerPair pair(small, ScriptedConfig());
  const TestRequest request = RequestOf(600);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  EXPECT_EQ(pair.Prefill(request, *reservation).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(PrefillServiceTest, AShortPromptDoesNotWaitForALongOne) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  RunningPrefill long_one(pair, RequestOf(6000));
  ASSERT_TRUE(ComesTrue([&] { return pair.prefill_service->num_calls() == 1; }));
  RunningPrefill short_one(pair, RequestOf(50));
  EXPECT_TRUE(short_one.Result().ok()) << short_one.Result().status();
  v1::WorkerLoad load;
  pair.prefill_service->AddLoad(&load);
  EXPECT_EQ(load.transfers(), 1u);
  EXPECT_GT(load.pending_prompt_tokens(), 1000u);
  EXPECT_TRUE(long_one.Result().ok()) << long_one.Result().status();
}

TEST(PrefillServiceTest, DrainingRefusesAndFinishes) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  const TestRequest late = RequestOf(10);
  const auto reservation = pair.Reserve(late);
  ASSERT_TRUE(reservation.ok());
  RunningPrefill running(pair, RequestOf(2000));
  ASSERT_TRUE(ComesTrue([&] { return pair.prefill_service->num_calls() == 1; }));
  pair.prefill_service->Drain();
  const absl::Status refused = pair.Prefill(late, *reservation).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FaultScopeOf(refused), FaultScope::kPeer);
  EXPECT_EQ(pair.prefill_service->AwaitIdle(absl::Milliseconds(1)), 1);
  EXPECT_EQ(pair.prefill_service->AwaitIdle(absl::Seconds(30)), 0);
  EXPECT_TRUE(running.Result().ok()) << running.Result().status();
}

TEST(PrefillServiceTest, ACallerThatLeavesEndsItsCall) {
  WorkerPair pair(SlowConfig(), ScriptedConfig());
  const TestRequest request = RequestOf(4000);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  const absl::Time leaves = RealClock().Now() + absl::Milliseconds(50);
  const absl::Status status = pair.prefill_service
                                  ->Prefill(pair.PrefillCall(request, *reservation),
                                            {RealClock().Now() + absl::Seconds(60),
                                             [leaves] { return RealClock().Now() > leaves; }})
                                  .status();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.prefill));
}

TEST(PrefillServiceTest, ADeadlineAndALeaseEndACallInTheMiddle) {
  WorkerConfig brief = ScriptedConfig();
  brief.reservation_lease = absl::Milliseconds(100);
  WorkerPair pair(SlowConfig(), brief);
  TestRequest request = RequestOf(4000);
  auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  const absl::Status over = pair.Prefill(request, *reservation).status();
  EXPECT_EQ(over.code(), absl::StatusCode::kAborted) << over;
  EXPECT_THAT(std::string(over.message()), HasSubstr("reservation.lease: is 100ms"));
  request = RequestOf(4000);
  reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  const absl::Status late = pair.prefill_service
                                ->Prefill(pair.PrefillCall(request, *reservation),
                                          {RealClock().Now() + absl::Milliseconds(40), {}})
                                .status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded) << late;
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.prefill));
}

TEST(PrefillServiceTest, RefusesABadCallByName) {
  WorkerPair pair;
  const TestRequest request = RequestOf(300);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  const v1::PrefillCall good = pair.PrefillCall(request, *reservation);
  const auto refusal = [&](void (*spoil)(v1::PrefillCall&)) {
    v1::PrefillCall call = good;
    call.mutable_reservation()->set_transfer_id(rpc::NewTransferId());
    spoil(call);
    const absl::Status status =
        pair.prefill_service->Prefill(call, {absl::InfiniteFuture(), {}}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](v1::PrefillCall& c) { c.mutable_reservation()->set_transfer_id("x"); }),
              HasSubstr("transfer_id: has 1 bytes"));
  EXPECT_THAT(refusal([](v1::PrefillCall& c) { c.mutable_reservation()->clear_lease(); }),
              HasSubstr("reservation.lease: is 0"));
  EXPECT_THAT(refusal([](v1::PrefillCall& c) { c.mutable_reservation()->set_held_tokens(100); }),
              HasSubstr("held_tokens: is 100"));
  EXPECT_THAT(refusal([](v1::PrefillCall& c) { c.mutable_sampler()->set_num_draws(3); }),
              HasSubstr("num_draws: is 3"));
  EXPECT_THAT(
      refusal([](v1::PrefillCall& c) { c.mutable_sampler()->mutable_sampling()->set_top_p(7); }),
      HasSubstr("top_p"));
  EXPECT_THAT(refusal([](v1::PrefillCall& c) { c.set_prompt_token_ids(7, 256); }),
              HasSubstr("id 256"));
  EXPECT_TRUE(pair.Prefill(request, *reservation).ok());
}

TEST(PrefillServiceTest, RefusesAReservationOfAnotherSize) {
  WorkerPair pair;
  const TestRequest request = RequestOf(300);
  const auto reservation = pair.Reserve(request);
  ASSERT_TRUE(reservation.ok());
  v1::KvReservation smaller = *reservation;
  smaller.mutable_pages(0)->mutable_pages()->RemoveLast();
  const absl::Status status = pair.Prefill(request, smaller).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("has 2 pages, 300 tokens of which 0 are held need 3"));
  EXPECT_TRUE(WorkerPair::IsAllFree(*pair.prefill));
}

}  // namespace
}  // namespace isthmus::worker
