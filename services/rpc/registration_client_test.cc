// SPDX-License-Identifier: Apache-2.0
// A worker's registration streams against routers that take, refuse, command and vanish, over real
// loopback connections.
#include "services/rpc/registration_client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "proto/cluster.grpc.pb.h"
#include "services/rpc/channel.h"
#include "services/rpc/server.h"
#include "services/rpc/status.h"
#include "services/rpc/timekeeper.h"

namespace isthmus::rpc {
namespace {

using testing::HasSubstr;

// Bounded by ten seconds.
bool Eventually(const std::function<bool()>& holds) {
  for (int i = 0; i < 10000 && !holds(); ++i) RealClock().Sleep(absl::Milliseconds(1));
  return holds();
}

class ScriptedRouter : public v1::Registration::Service {
 public:
  grpc::Status Register(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::RouterCommand, v1::WorkerReport>* stream) override {
    v1::WorkerReport report;
    if (!ReadWithin(opening_patience, &keeper, context, stream, &report)) {
      ++num_silent;
      return grpc::Status::CANCELLED;
    }
    ++num_cards;
    if (refuses) {
      return ToGrpcStatus(absl::FailedPreconditionError("index_topk differs: 4, ours 64"), context);
    }
    {
      MutexLock lock(mutex);
      card = report.card();
    }
    v1::RouterCommand command;
    command.mutable_registered()->mutable_load_interval()->set_nanos(5000000);
    command.mutable_registered()->mutable_heartbeat_interval()->set_nanos(100000000);
    stream->Write(command);
    if (commands_drain) {
      command.mutable_drain()->set_reason("upgrade");
      stream->Write(command);
    }
    while (stream->Read(&report)) {
      MutexLock lock(mutex);
      if (report.has_load()) loads.push_back(report.load().active_sequences());
      if (report.has_draining()) drain_reason = report.draining().reason();
    }
    ++num_ends;
    return grpc::Status::OK;
  }

  std::vector<uint64_t> Loads() {
    MutexLock lock(mutex);
    return loads;
  }

  Timekeeper keeper;
  absl::Duration opening_patience = absl::Seconds(10);
  std::atomic<bool> refuses = false;
  std::atomic<bool> commands_drain = false;
  std::atomic<int> num_cards = 0;
  std::atomic<int> num_ends = 0;
  std::atomic<int> num_silent = 0;
  Mutex mutex;
  v1::WorkerCard card;
  std::vector<uint64_t> loads;
  std::string drain_reason;
};

std::unique_ptr<RpcServer> Serve(ScriptedRouter& router, const std::string& address) {
  ServerOptions options;
  options.address = address;
  auto started = RpcServer::Start(options, {&router});
  EXPECT_TRUE(started.ok()) << started.status();
  return *std::move(started);
}

struct Fixture {
  Fixture() : server(Serve(router, "127.0.0.1:0")) {
    card.set_incarnation(7);
    card.set_address("127.0.0.1:1234");
  }
  std::unique_ptr<RegistrationClient> Connect(const std::vector<std::string>& routers) {
    RegistrationEvents events;
    events.load = [this] {
      v1::WorkerLoad load;
      load.set_active_sequences(active);
      return load;
    };
    events.on_drain = [this](const std::string& reason) {
      MutexLock lock(router.mutex);
      drained = reason;
    };
    auto client = std::make_unique<RegistrationClient>(routers, card, events, RealClock());
    client->Start();
    return client;
  }
  v1::WorkerCard card;
  std::atomic<uint64_t> active = 1;
  std::string drained;  // Guarded by router.mutex.
  ScriptedRouter router;
  std::unique_ptr<RpcServer> server;
};

TEST(RegistrationClientTest, SendsItsCardThenLoadsWhenTheyChange) {
  Fixture fixture;
  const auto client = fixture.Connect({fixture.server->address()});
  ASSERT_TRUE(Eventually([&] { return client->num_registered() == 1; })) << client->problem();
  EXPECT_EQ(client->problem(), "");
  ASSERT_TRUE(Eventually([&] { return !fixture.router.Loads().empty(); }));
  EXPECT_EQ(fixture.router.card.address(), "127.0.0.1:1234");
  fixture.active = 2;
  ASSERT_TRUE(Eventually([&] { return fixture.router.Loads().back() == 2; }));
  const size_t before = fixture.router.Loads().size();
  RealClock().Sleep(absl::Milliseconds(350));
  // Heartbeats alone: one in 100 ms, not one in 5 ms.
  const size_t heartbeats = fixture.router.Loads().size() - before;
  EXPECT_GE(heartbeats, 1);
  EXPECT_LE(heartbeats, 6);
}

TEST(RegistrationClientTest, AnnouncesThatItDrainsOnEveryStream) {
  Fixture fixture;
  const auto client = fixture.Connect({fixture.server->address()});
  ASSERT_TRUE(Eventually([&] { return client->num_registered() == 1; }));
  client->SetDraining("SIGTERM");
  const auto reason = [&] {
    MutexLock lock(fixture.router.mutex);
    return fixture.router.drain_reason;
  };
  EXPECT_TRUE(Eventually([&] { return reason() == "SIGTERM"; }));
  const std::string address = fixture.server->address();
  fixture.server->Stop(absl::ZeroDuration());
  EXPECT_TRUE(Eventually([&] { return client->num_registered() == 0; }));
  {
    MutexLock lock(fixture.router.mutex);
    fixture.router.drain_reason.clear();
  }
  fixture.server = Serve(fixture.router, address);
  EXPECT_TRUE(Eventually([&] { return reason() == "SIGTERM"; })) << client->problem();
}

TEST(RegistrationClientTest, ComesBackToARouterThatStartsLate) {
  Fixture fixture;
  const std::string address = fixture.server->address();
  fixture.server->Stop(absl::ZeroDuration());
  const auto client = fixture.Connect({address});
  ASSERT_TRUE(Eventually([&] { return !client->problem().empty(); }));
  EXPECT_EQ(client->num_registered(), 0);
  EXPECT_THAT(client->problem(), HasSubstr(address));
  fixture.server = Serve(fixture.router, address);
  EXPECT_TRUE(Eventually([&] { return client->num_registered() == 1; })) << client->problem();
}

TEST(RegistrationClientTest, KeepsARefusalAndTriesSlowly) {
  Fixture fixture;
  fixture.router.refuses = true;
  const auto client = fixture.Connect({fixture.server->address()});
  ASSERT_TRUE(Eventually([&] { return fixture.router.num_cards > 0; }));
  ASSERT_TRUE(Eventually([&] {
    return client->problem().find("index_topk differs: 4, ours 64") != std::string::npos;
  })) << client->problem();
  RealClock().Sleep(absl::Milliseconds(300));
  EXPECT_EQ(fixture.router.num_cards, 1);
}

TEST(RegistrationClientTest, PassesOnACommandToDrain) {
  Fixture fixture;
  fixture.router.commands_drain = true;
  const auto client = fixture.Connect({fixture.server->address()});
  EXPECT_TRUE(Eventually([&] {
    MutexLock lock(fixture.router.mutex);
    return fixture.drained == "upgrade";
  }));
}

TEST(RegistrationClientTest, StopsAtOnceAndIsMissedAtOnce) {
  Fixture fixture;
  const auto client = fixture.Connect({fixture.server->address(), "127.0.0.1:1"});
  ASSERT_TRUE(Eventually([&] { return client->num_registered() == 1; }));
  ASSERT_TRUE(Eventually([&] { return !client->problem().empty(); }));
  const absl::Time start = RealClock().Now();
  client->Stop();
  EXPECT_LT(RealClock().Now() - start, absl::Seconds(1));
  EXPECT_TRUE(Eventually([&] { return fixture.router.num_ends == 1; }));
}

TEST(TimekeeperTest, EndsAStreamThatSaysNothing) {
  Fixture fixture;
  fixture.router.opening_patience = absl::Milliseconds(50);
  const auto stub = v1::Registration::NewStub(OpenChannel(fixture.server->address()));
  grpc::ClientContext context;
  const auto stream = stub->Register(&context);
  v1::RouterCommand command;
  EXPECT_FALSE(stream->Read(&command));
  EXPECT_EQ(stream->Finish().error_code(), grpc::StatusCode::CANCELLED);
  EXPECT_TRUE(Eventually([&] { return fixture.router.num_silent == 1; }));
  EXPECT_EQ(fixture.router.num_cards, 0);
}

}  // namespace
}  // namespace isthmus::rpc
