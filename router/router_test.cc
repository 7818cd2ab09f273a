// SPDX-License-Identifier: Apache-2.0
// Whole requests through the router, with workers that live in memory: what succeeds, what is tried
// again, what ends early, and that nothing stays taken.
#include "router/router.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "router/router_metrics.h"
#include "router/testing/scripted_worker.h"
#include "services/base/fault.h"

namespace isthmus::router {
namespace {

using router::testing::Eventually;
using router::testing::ScriptedNetwork;
using router::testing::ScriptedWorker;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

RouterConfig TinyConfig() {
  RouterConfig config;
  config.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
  config.max_active_requests = 4;
  config.max_behind_messages = 16;
  config.lease = absl::Minutes(1);
  return config;
}

const Acceptor& TinyAcceptor() {
  static const std::unique_ptr<Acceptor> acceptor = *Acceptor::Create(TinyConfig());
  return *acceptor;
}

v1::GenerateRequest RequestOf(uint32_t max_output_tokens) {
  v1::GenerateRequest request;
  for (int i = 0; i < 5; ++i) request.mutable_token_ids()->add_ids(30);
  request.mutable_sampling()->set_max_output_tokens(max_output_tokens);
  return request;
}

// A client that reads at once unless told otherwise.
struct Client {
  std::atomic<bool> has_left = false;
  std::atomic<bool> is_stuck = false;
  std::atomic<int> num_cancels = 0;
  std::vector<uint32_t> tokens;
  std::atomic<int> num_deltas = 0;
  int num_finishes = 0;
  absl::Time deadline = RealClock().Now() + absl::Seconds(30);

  ClientStream stream() {
    return {deadline, [this] { return has_left.load(); },
            [this](const v1::GenerateReply& reply) { return Write(reply); },
            [this] {
              ++num_cancels;
              has_left = true;
            }};
  }
  bool Write(const v1::GenerateReply& reply) {
    while (is_stuck && !has_left) RealClock().Sleep(absl::Milliseconds(1));
    if (has_left) return false;
    for (const uint32_t id : reply.delta().token_ids()) tokens.push_back(id);
    if (reply.has_finish()) ++num_finishes;
    ++num_deltas;
    return true;
  }
};

// A router with workers that are registered.
class RouterTest : public ::testing::Test {
 protected:
  std::shared_ptr<ScriptedWorker> Add(v1::WorkerRole role, uint64_t incarnation,
                                      const std::string& address) {
    auto worker = network_.Add(role, incarnation, address);
    auto registration = view_.Register(worker->card);
    EXPECT_TRUE(registration.ok()) << registration.status();
    registrations_[incarnation] = *std::move(registration);
    EXPECT_TRUE(Eventually([&] { return view_.Find(address)->problem().empty(); }));
    return worker;
  }
  void AddPair() {
    prefill_ = Add(v1::WORKER_ROLE_PREFILL, 1, "p:1");
    decode_ = Add(v1::WORKER_ROLE_DECODE, 2, "d:1");
  }
  void AddSecondPair() {
    prefill2_ = Add(v1::WORKER_ROLE_PREFILL, 3, "p:2");
    decode2_ = Add(v1::WORKER_ROLE_DECODE, 4, "d:2");
  }
  absl::Status Generate(Client& client, uint32_t max_output_tokens = 4) {
    return router_.Generate(RequestOf(max_output_tokens), client.stream());
  }
  // Workers say that they are there, which clears what their last calls did.
  void ReportAll() {
    for (auto& [incarnation, registration] : registrations_) registration->Report({});
  }
  // Every end of a request leaves nothing behind.
  void TearDown() override {
    EXPECT_TRUE(Eventually([&] { return router_.num_open() == 0; }));
    for (const auto& worker : {prefill_, decode_, prefill2_, decode2_}) {
      if (worker == nullptr) continue;
      EXPECT_EQ(worker->num_held(), 0) << worker->card.address();
    }
    registrations_.clear();
    router_.Stop();
    view_.Stop();
  }

  ScriptedNetwork network_;
  ClusterView view_{TinyConfig(), network_.connect(), RealClock()};
  rpc::MetricsExporter metrics_{"router", kAllMetrics};
  Router router_{TinyConfig(), &TinyAcceptor(), &view_, &metrics_, RealClock()};
  std::shared_ptr<ScriptedWorker> prefill_;
  std::shared_ptr<ScriptedWorker> decode_;
  std::shared_ptr<ScriptedWorker> prefill2_;
  std::shared_ptr<ScriptedWorker> decode2_;
  std::map<uint64_t, std::unique_ptr<ClusterView::Registration>> registrations_;
};

absl::Status Gone() {
  return WithFaultScope(absl::UnavailableError("connection refused"), FaultScope::kPeer);
}

TEST_F(RouterTest, StreamsAReplyFromItsFirstTokenToItsFinish) {
  AddPair();
  Client client;
  const absl::Status status = Generate(client);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_THAT(client.tokens, ElementsAre(20, 21, 22, 23));
  EXPECT_EQ(client.num_finishes, 1);
  EXPECT_EQ(decode_->Count("cancel done"), 0);
}

TEST_F(RouterTest, WithoutWorkersIsUnavailableAtOnce) {
  Client client;
  const absl::Status status = Generate(client);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_FALSE(router_.Status().is_ready());
  AddPair();
  EXPECT_TRUE(router_.Status().is_ready()) << router_.Status().not_ready_reason();
}

TEST_F(RouterTest, AFailureBeforeTheFirstTokenIsTriedOnAnotherPair) {
  AddPair();
  AddSecondPair();
  v1::WorkerLoad busy;
  busy.set_pending_prompt_tokens(100);
  registrations_[3]->Report(busy);
  prefill_->Set([](ScriptedWorker& w) { w.prefill_answers = {Gone()}; });
  Client client;
  const absl::Status status = Generate(client);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(client.tokens.size(), 4);
  EXPECT_EQ(prefill_->Count("prefill"), 1);
  EXPECT_EQ(prefill2_->Count("prefill"), 1);
  EXPECT_EQ(decode_->seen.size() + decode2_->seen.size(), 2);  // Fresh for every attempt.
}

TEST_F(RouterTest, LostDataIsTriedAgainEvenOnTheOnlyPair) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) {
    w.handoff_answers = {absl::DataLossError("page group 3"), absl::OkStatus()};
  });
  Client client;
  const absl::Status status = Generate(client);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(decode_->seen.size(), 2);
  EXPECT_TRUE(Eventually([&] { return decode_->Count("cancel done") == 1; }));
}

TEST_F(RouterTest, ADeadlineBetweenWorkersIsNotTheRequests) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) {
    w.prefill_answers = {
        WithFaultScope(absl::DeadlineExceededError("2 pages not acknowledged"), FaultScope::kPeer)};
  });
  Client client;
  const absl::Status status = Generate(client);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 pages not acknowledged"));
}

TEST_F(RouterTest, GivesUpAfterSoManyAttemptsWithTheLastError) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) { w.handoff_answers = {absl::AbortedError("lease")}; });
  Client client;
  const absl::Status status = Generate(client);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("tried 3 times"));
  EXPECT_EQ(decode_->seen.size(), 3);
  EXPECT_TRUE(client.tokens.empty());
}

TEST_F(RouterTest, ARequestThatIsWrongIsNotTriedAgainAndMarksNobody) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) {
    w.reserve_answers = {absl::InvalidArgumentError("too long"), absl::OkStatus()};
  });
  Client client;
  EXPECT_TRUE(absl::IsInvalidArgument(Generate(client)));
  EXPECT_EQ(decode_->Count("reserve"), 1);
  EXPECT_TRUE(router_.Readiness().ok());
}

TEST_F(RouterTest, AWorkerThatFailedGetsNothingUntilItReports) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) { w.prefill_answers = {Gone(), absl::OkStatus()}; });
  Client client;
  std::thread reporter([&] {
    EXPECT_TRUE(Eventually([&] { return !view_.Find("p:1")->problem().empty(); }));
    ReportAll();
  });
  const absl::Status status = Generate(client);
  reporter.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(RouterTest, AfterTheFirstTokenThereIsOneErrorAndNoRetry) {
  AddPair();
  AddSecondPair();
  for (const auto& worker : {decode_, decode2_}) {
    worker->Set([](ScriptedWorker& w) { w.streams = false; });
  }
  Client client;
  std::thread failure([&] {
    EXPECT_TRUE(Eventually([&] { return client.num_deltas == 1; }));
    for (const auto& worker : {decode_, decode2_}) {
      worker->Set([](ScriptedWorker& w) { w.ends_stream = true; });
    }
  });
  const absl::Status status = Generate(client);
  failure.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_EQ(client.num_finishes, 0);
  EXPECT_EQ(decode_->seen.size() + decode2_->seen.size(), 1);
}

TEST_F(RouterTest, APrefillForADecodeWorkerThatIsGoneDoesNotGoOn) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) { w.holds_prefill = true; });
  Client client;
  std::thread loss([&] {
    EXPECT_TRUE(Eventually([&] { return prefill_->Count("prefill") == 1; }));
    registrations_.erase(2);
    decode_->Set([](ScriptedWorker& w) { w.ends_stream = true; });
  });
  const absl::Status status = Generate(client);
  loss.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("token stream has ended"));
  EXPECT_TRUE(view_.Find("p:1")->problem().empty());  // It is not to blame.
}

TEST_F(RouterTest, AClientThatLeavesInPrefillFreesBothWorkersInOrder) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) { w.holds_prefill = true; });
  Client client;
  std::thread leaver([&] {
    EXPECT_TRUE(Eventually([&] { return prefill_->Count("prefill") == 1; }));
    client.has_left = true;
  });
  EXPECT_TRUE(absl::IsCancelled(Generate(client)));
  leaver.join();
  EXPECT_TRUE(Eventually([&] { return decode_->Count("cancel done") == 1; }));
  EXPECT_EQ(prefill_->Count("cancel not done"), 1);  // The word is for decode workers.
}

TEST_F(RouterTest, WithoutThePrefillWorkersWordThePagesMayStillBeWritten) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) {
    w.prefill_answers = {absl::InternalError("a bug")};
    w.cancel_answers = {Gone()};
  });
  Client client;
  EXPECT_EQ(Generate(client).code(), absl::StatusCode::kInternal);
  EXPECT_TRUE(Eventually([&] { return decode_->Count("cancel not done") == 1; }));
  prefill_->Set([](ScriptedWorker& w) { w.transfers.clear(); });
}

TEST_F(RouterTest, TheClientDoesNotWaitForTheCancellation) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) {
    w.handoff_answers = {absl::InternalError("a bug")};
    w.holds_cancel = true;
  });
  Client client;
  EXPECT_EQ(Generate(client).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(decode_->num_held(), 1);
  EXPECT_EQ(router_.active(), 0);
  decode_->Set([](ScriptedWorker& w) { w.holds_cancel = false; });
  EXPECT_TRUE(Eventually([&] { return decode_->num_held() == 0; }));
}

TEST_F(RouterTest, ARequestWaitsForRoomAndGoesOnWhenThereIsSome) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) { w.num_slots = 0; });
  Client client;
  absl::Status status;
  std::thread waiter([&] { status = Generate(client); });
  EXPECT_TRUE(Eventually([&] { return decode_->Count("reserve") >= 1; }));
  EXPECT_TRUE(Eventually([&] { return router_.Status().queued_requests() == 1; }));
  decode_->Set([](ScriptedWorker& w) { w.num_slots = 1; });
  ReportAll();
  waiter.join();
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(client.tokens.size(), 4);
}

TEST_F(RouterTest, AWorkerWithRoomServesWhileAnotherIsFull) {
  AddPair();
  AddSecondPair();
  decode_->Set([](ScriptedWorker& w) { w.num_slots = 0; });
  for (int i = 0; i < 4; ++i) {
    Client client;
    EXPECT_TRUE(Generate(client).ok());
  }
  EXPECT_EQ(decode2_->Count("handoff"), 4);
}

// Once it knows that there is no room anywhere: the sequences of one worker give way, not those of
// all.
TEST_F(RouterTest, OneOfTheFullWorkersIsAskedUntilOthersHaveGivenWay) {
  AddPair();
  AddSecondPair();
  const std::vector<std::shared_ptr<ScriptedWorker>> both = {decode_, decode2_};
  for (const auto& worker : both) {
    worker->Set([](ScriptedWorker& w) {
      w.num_slots = 0;
      w.num_give_way = 3;
    });
  }
  Client client;
  EXPECT_TRUE(Generate(client).ok());
  std::vector<size_t> asks = {decode_->Count("ask"), decode2_->Count("ask")};
  std::ranges::sort(asks);
  EXPECT_THAT(asks, ElementsAre(0, 4));  // The last one is admitted.
}

// One of two full workers has nobody who would give way, whichever is tried first.
TEST_F(RouterTest, AWorkerWhereNobodyGivesWayIsNotTheOnlyOneAsked) {
  AddPair();
  AddSecondPair();
  const std::vector<std::shared_ptr<ScriptedWorker>> both = {decode_, decode2_};
  for (int i = 0; i < 6; ++i) {
    const std::shared_ptr<ScriptedWorker>& able = both[static_cast<size_t>(i) / 3];
    for (const auto& worker : both) {
      worker->Set([&](ScriptedWorker& w) {
        w.num_slots = w.transfers.size();
        w.num_give_way = worker == able ? 1 : 0;
      });
    }
    Client client;
    client.deadline = RealClock().Now() + absl::Seconds(5);
    const absl::Status status = Generate(client);
    EXPECT_TRUE(status.ok()) << able->card.address() << ": " << status;
  }
}

TEST_F(RouterTest, AFullPrefillWorkerIsNoReasonToAskADecodeWorker) {
  AddPair();
  AddSecondPair();
  for (const auto& worker : {prefill_, prefill2_}) {
    worker->Set([](ScriptedWorker& w) {
      w.prefill_answers = {absl::ResourceExhaustedError("all places for waiting prompts are taken"),
                           absl::OkStatus()};
    });
  }
  Client client;
  EXPECT_TRUE(Generate(client).ok());
  EXPECT_EQ(decode_->Count("ask") + decode2_->Count("ask"), 0);
}

TEST_F(RouterTest, AWaitForRoomEndsWithTheDeadlineOrTheClient) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) { w.num_slots = 0; });
  Client late;
  late.deadline = RealClock().Now() + absl::Milliseconds(60);
  const absl::Status status = Generate(late);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("no state slot is free"));
  Client gone;
  gone.has_left = true;
  EXPECT_TRUE(absl::IsCancelled(Generate(gone)));
}

TEST_F(RouterTest, ASlowClientIsEndedAndItsPagesAreFreed) {
  AddPair();
  decode_->Set([](ScriptedWorker& w) { w.streams = false; });
  Client client;
  std::thread decoder([&] {
    EXPECT_TRUE(Eventually([&] { return client.num_deltas == 1; }));
    client.is_stuck = true;
    std::string id;
    decode_->Set([&](ScriptedWorker& w) { id = *w.seen.begin(); });
    decode_->Send(id, 1, 60, v1::SEQUENCE_END_UNSPECIFIED);
  });
  const absl::Status status = Generate(client, 100);
  decoder.join();
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(client.num_cancels, 1);
  EXPECT_TRUE(Eventually([&] { return decode_->Count("cancel done") == 1; }));
}

TEST_F(RouterTest, ARestartedWorkerFailsItsRequestsAtOnce) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) { w.holds_prefill = true; });
  Client client;
  std::thread restart([&] {
    EXPECT_TRUE(Eventually([&] { return prefill_->Count("prefill") == 1; }));
    prefill_->Set([](ScriptedWorker& w) { w.transfers.clear(); });
    Add(v1::WORKER_ROLE_PREFILL, 9, "p:1");
  });
  // The new run serves the second attempt.
  const absl::Status status = Generate(client);
  restart.join();
  EXPECT_TRUE(status.ok()) << status;
  prefill_->Set([](ScriptedWorker& w) { w.transfers.clear(); });
}

TEST_F(RouterTest, ADrainingRouterFinishesWhatItHasAndTakesNoMore) {
  AddPair();
  prefill_->Set([](ScriptedWorker& w) { w.holds_prefill = true; });
  Client inside;
  absl::Status status;
  std::thread request([&] { status = Generate(inside); });
  EXPECT_TRUE(Eventually([&] { return prefill_->Count("prefill") == 1; }));
  v1::DrainTarget target;
  EXPECT_EQ(router_.Drain(target, absl::Milliseconds(5))->transfers(), 1);
  Client late;
  const absl::Status refused = Generate(late);
  EXPECT_TRUE(absl::IsUnavailable(refused));
  EXPECT_THAT(std::string(refused.message()), HasSubstr("draining"));
  EXPECT_TRUE(router_.Status().is_draining());
  EXPECT_FALSE(router_.Readiness().ok());
  prefill_->Set([](ScriptedWorker& w) { w.holds_prefill = false; });
  EXPECT_EQ(router_.Drain(target, absl::Seconds(10))->transfers(), 0);
  request.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(RouterTest, DrainsAWorkerByItsAddress) {
  AddPair();
  v1::DrainTarget target;
  target.set_address("d:1");
  EXPECT_TRUE(router_.Drain(target, absl::ZeroDuration()).ok());
  EXPECT_EQ(decode_->Count("drain"), 1);
  target.set_address("d:9");
  EXPECT_TRUE(absl::IsNotFound(router_.Drain(target, absl::ZeroDuration()).status()));
  registrations_[2]->SetDraining("operator");
  Client client;
  const absl::Status status = Generate(client);
  EXPECT_TRUE(absl::IsUnavailable(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("d:1: draining: operator"));
}

TEST_F(RouterTest, GaugesCountWorkersByStateAndGoBackToZero) {
  AddPair();
  router_.PublishGauges();
  registrations_[2]->SetDraining("operator");
  router_.PublishGauges();  // Must not end the process: every label is known.
  registrations_.erase(1);
  router_.PublishGauges();
}

}  // namespace
}  // namespace isthmus::router
