// SPDX-License-Identifier: Apache-2.0
// Workers that come, go, come back and do not match.
#include "router/cluster_view.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "router/testing/scripted_worker.h"

namespace isthmus::router {
namespace {

using router::testing::Eventually;
using router::testing::ScriptedNetwork;
using router::testing::ScriptedWorker;
using ::testing::HasSubstr;

RouterConfig ConfigOf(absl::Duration lease) {
  RouterConfig config;
  config.lease = lease;
  config.max_workers = 2;
  return config;
}

struct Fixture {
  explicit Fixture(absl::Duration lease = absl::Minutes(1))
      : prefill(network.Add(v1::WORKER_ROLE_PREFILL, 1, "p:1")),
        decode(network.Add(v1::WORKER_ROLE_DECODE, 2, "d:1")),
        view(ConfigOf(lease), network.connect(), RealClock()) {}

  std::unique_ptr<ClusterView::Registration> Register(const ScriptedWorker& worker) {
    auto registration = view.Register(worker.card);
    EXPECT_TRUE(registration.ok()) << registration.status();
    return registration.ok() ? *std::move(registration) : nullptr;
  }
  // The problem of the worker at an address; "unknown" when the view does not show it.
  std::string ProblemOf(const std::string& address) {
    for (const v1::WorkerStatus& status : view.Statuses()) {
      if (status.address() == address) return status.problem();
    }
    return "unknown";
  }

  ScriptedNetwork network;
  std::shared_ptr<ScriptedWorker> prefill;
  std::shared_ptr<ScriptedWorker> decode;
  ClusterView view;
};

TEST(ClusterViewTest, AWorkerIsReadyWhileItsStreamIsOpenAndSuspectAtOnceAfterIt) {
  Fixture fixture;
  EXPECT_EQ(fixture.ProblemOf("d:1"), "unknown");
  auto registration = fixture.Register(*fixture.decode);
  EXPECT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
  v1::WorkerLoad load;
  load.set_free_pages(5);
  EXPECT_TRUE(registration->Report(load));
  EXPECT_EQ(fixture.view.Statuses()[0].load().free_pages(), 5);
  registration.reset();
  EXPECT_EQ(fixture.ProblemOf("d:1"), "suspect: its registration stream has ended");
  EXPECT_FALSE(fixture.view.Statuses()[0].is_reachable());
  EXPECT_EQ(fixture.view.Find("d:1"), nullptr);
  const std::shared_ptr<WorkerLink> link = fixture.view.links()[0];
  registration = fixture.Register(*fixture.decode);
  EXPECT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
  EXPECT_EQ(fixture.view.links()[0], link);  // Its requests go on.
}

TEST(ClusterViewTest, RefusesIntervalsThatEveryWorkerWouldExceed) {
  RouterConfig config;
  EXPECT_TRUE(ClusterView::CheckConfig(config).ok());
  config.lease = absl::Milliseconds(1999);
  EXPECT_EQ(ClusterView::CheckConfig(config).message(),
            "registration.lease: is 1.999s, want at least twice registration.heartbeat_interval, "
            "1s");
  config = RouterConfig();
  config.load_interval = absl::Seconds(2);
  EXPECT_EQ(ClusterView::CheckConfig(config).message(),
            "registration.load_interval: is 2s, want at most registration.heartbeat_interval, 1s");
}

TEST(ClusterViewTest, RefusesWhatDiffersAndNamesBothValues) {
  Fixture fixture;
  auto registration = fixture.Register(*fixture.prefill);
  fixture.decode->card.mutable_values()->set_index_topk(4);
  const absl::Status refused = fixture.view.Register(fixture.decode->card).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(),
            "model.index_topk differs: this worker's is 4, that of prefill worker p:1 64");
  EXPECT_THAT(fixture.ProblemOf("d:1"), HasSubstr("refused: model.index_topk differs"));
  registration.reset();  // A suspect's values bind nobody.
  const auto taken = fixture.Register(*fixture.decode);
  EXPECT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
}

TEST(ClusterViewTest, RefusesAnotherProtocolVersionARoleAndAnAddressThatAreNone) {
  Fixture fixture;
  v1::WorkerCard card = fixture.decode->card;
  card.set_protocol_version(77);
  const absl::Status version = fixture.view.Register(card).status();
  EXPECT_EQ(version.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(version.message()), HasSubstr("the worker's is 77, the router's 3"));
  card = fixture.decode->card;
  card.set_role(v1::WORKER_ROLE_UNSPECIFIED);
  EXPECT_TRUE(absl::IsInvalidArgument(fixture.view.Register(card).status()));
  card = fixture.decode->card;
  card.set_address("nowhere");
  EXPECT_TRUE(absl::IsInvalidArgument(fixture.view.Register(card).status()));
  card = fixture.decode->card;
  card.set_incarnation(0);
  EXPECT_TRUE(absl::IsInvalidArgument(fixture.view.Register(card).status()));
}

TEST(ClusterViewTest, TakesOneStreamOfARunAndSoManyWorkers) {
  Fixture fixture;
  const auto prefill = fixture.Register(*fixture.prefill);
  EXPECT_TRUE(absl::IsAlreadyExists(fixture.view.Register(fixture.prefill->card).status()));
  const auto decode = fixture.Register(*fixture.decode);
  const auto third = fixture.network.Add(v1::WORKER_ROLE_DECODE, 3, "d:2");
  EXPECT_EQ(fixture.view.Register(third->card).status(),
            absl::ResourceExhaustedError("2 workers are registered, want at most 2"));
}

TEST(ClusterViewTest, AnotherRunAtTheSameAddressReplacesTheFormerAtOnce) {
  Fixture fixture;
  const auto former = fixture.Register(*fixture.decode);
  const std::shared_ptr<WorkerLink> link = fixture.view.links()[0];
  const auto mailbox = std::make_shared<TokenMailbox>(8, std::function<void()>(), RealClock());
  link->relay().Subscribe("t", mailbox);
  // It need not even match the one whose place it takes.
  const auto next = fixture.network.Add(v1::WORKER_ROLE_DECODE, 3, "d:1");
  next->card.mutable_values()->set_index_topk(4);
  const auto registration = fixture.Register(*next);
  EXPECT_TRUE(absl::IsUnavailable(mailbox->TakeFor(absl::ZeroDuration()).status()));
  EXPECT_TRUE(absl::IsUnavailable(link->Standing()));
  EXPECT_FALSE(former->Report(v1::WorkerLoad()));
  ASSERT_EQ(fixture.view.links().size(), 1);
  EXPECT_EQ(fixture.view.links()[0]->incarnation(), 3);
  EXPECT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
}

TEST(ClusterViewTest, ASilentStreamIsSuspectUntilItSpeaksAgain) {
  Fixture fixture(absl::Milliseconds(50));
  const auto registration = fixture.Register(*fixture.prefill);
  EXPECT_EQ(fixture.ProblemOf("p:1"), "");
  EXPECT_TRUE(Eventually([&] { return !fixture.ProblemOf("p:1").empty(); }));
  EXPECT_EQ(fixture.ProblemOf("p:1"), "suspect: silent for more than 50ms");
  EXPECT_TRUE(registration->Report(v1::WorkerLoad()));
  EXPECT_EQ(fixture.ProblemOf("p:1"), "");
}

TEST(ClusterViewTest, ADrainingWorkerSaysWhyUntilItHasLeft) {
  Fixture fixture;
  auto registration = fixture.Register(*fixture.prefill);
  EXPECT_TRUE(registration->SetDraining("upgrade"));
  EXPECT_EQ(fixture.ProblemOf("p:1"), "draining: upgrade");
  EXPECT_EQ(fixture.view.links()[0]->state(), v1::WORKER_STATE_DRAINING);
  registration.reset();
  EXPECT_EQ(fixture.ProblemOf("p:1"), "unknown");  // It has left, as it should.
}

TEST(ClusterViewTest, ALostTokenStreamFailsItsSequencesAndComesBack) {
  Fixture fixture;
  const auto registration = fixture.Register(*fixture.decode);
  ASSERT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
  const auto mailbox = std::make_shared<TokenMailbox>(8, std::function<void()>(), RealClock());
  fixture.view.links()[0]->relay().Subscribe("t", mailbox);
  fixture.decode->Set([](ScriptedWorker& worker) { worker.ends_stream = true; });
  EXPECT_TRUE(absl::IsUnavailable(mailbox->TakeFor(absl::Seconds(10)).status()));
  fixture.decode->Set([](ScriptedWorker& worker) { worker.ends_stream = false; });
  EXPECT_TRUE(Eventually([&] { return fixture.ProblemOf("d:1").empty(); }));
}

TEST(ClusterViewTest, AStoppedOneTakesNobody) {
  Fixture fixture;
  fixture.view.Stop();
  EXPECT_TRUE(absl::IsUnavailable(fixture.view.Register(fixture.decode->card).status()));
}

}  // namespace
}  // namespace isthmus::router
