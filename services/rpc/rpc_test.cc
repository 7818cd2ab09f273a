// SPDX-License-Identifier: Apache-2.0
// Status, deadlines, health and the worker client over a real loopback connection.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "proto/cluster.grpc.pb.h"
#include "proto/worker.grpc.pb.h"
#include "services/base/clock.h"
#include "services/base/fault.h"
#include "services/rpc/channel.h"
#include "services/rpc/metrics_exporter.h"
#include "services/rpc/server.h"
#include "services/rpc/status.h"
#include "services/rpc/wire.h"
#include "services/rpc/worker_client.h"

namespace isthmus::rpc {
namespace {

using testing::HasSubstr;

class ScriptedDecode : public v1::DecodeService::Service {
 public:
  grpc::Status Reserve(grpc::ServerContext* context, const v1::ReserveCall* call,
                       v1::KvReservation* reply) override {
    if (call->num_prompt_tokens() == 0) {
      return ToGrpcStatus(WithFaultScope(absl::AbortedError("lease is gone"), FaultScope::kDevice),
                          context);
    }
    if (call->num_prompt_tokens() == 7) {
      return ToGrpcStatus(WithRoomSoon(absl::ResourceExhaustedError("no pages")), context);
    }
    while (call->num_prompt_tokens() == 99 && !context->IsCancelled()) {
      RealClock().Sleep(absl::Milliseconds(1));
    }
    if (context->IsCancelled()) was_cancelled = true;
    reply->set_transfer_id(call->transfer_id());
    return grpc::Status::OK;
  }

  grpc::Status Tokens(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::StepTokens, v1::TokensControl>* stream) override {
    v1::TokensControl control;
    if (!stream->Read(&control)) return grpc::Status::OK;
    stream->SendInitialMetadata();
    for (int i = 0; i < 3; ++i) {
      v1::StepTokens step;
      step.add_sequences()->set_first_index(control.hello().router_incarnation() + uint64_t(i));
      stream->Write(step);
    }
    return ToGrpcStatus(absl::AbortedError("that is all"), context);
  }

  std::atomic<bool> was_cancelled = false;
};

struct Fixture {
  Fixture() {
    auto started = RpcServer::Start({}, {&decode});
    EXPECT_TRUE(started.ok()) << started.status();
    server = *std::move(started);
    client = ConnectWorker(server->address());
  }
  ScriptedDecode decode;
  std::unique_ptr<RpcServer> server;
  std::unique_ptr<WorkerClient> client;
};

TEST(StatusTest, CodeMessageAndScopeCrossTheWire) {
  Fixture fixture;
  const auto reply = fixture.client->Reserve({}, {absl::Seconds(5), {}});
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr("lease is gone"));
  EXPECT_THAT(std::string(reply.status().message()), HasSubstr(fixture.server->address()));
  EXPECT_EQ(FaultScopeOf(reply.status()), FaultScope::kDevice);
  EXPECT_FALSE(HasRoomSoon(reply.status()));
}

TEST(StatusTest, ThatThereWillBeRoomCrossesTheWire) {
  Fixture fixture;
  v1::ReserveCall call;
  call.set_num_prompt_tokens(7);
  const absl::Status status = fixture.client->Reserve(call, {absl::Seconds(5), {}}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(HasRoomSoon(status));
  EXPECT_EQ(FaultScopeOf(status), FaultScope::kRequest);
}

TEST(StatusTest, AWorkerErrorKeepsItsScope) {
  const absl::Status status =
      WithFaultScope(absl::DataLossError("page group 3"), FaultScope::kPeer);
  const absl::Status back = FromWorkerError(ToWorkerError(status));
  EXPECT_EQ(back.code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(back.message(), "page group 3");
  EXPECT_EQ(FaultScopeOf(back), FaultScope::kPeer);
}

TEST(ServerTest, RefusesAnAddressWithoutARealPort) {
  for (const char* address :
       {"127.0.0.1:99999", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:-1", ""}) {
    const absl::Status status = RpcServer::Start({.address = address}, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()), HasSubstr(address));
  }
}

TEST(WorkerClientTest, CallsAndAnswers) {
  Fixture fixture;
  v1::ReserveCall call;
  call.set_transfer_id("t");
  call.set_num_prompt_tokens(1);
  const auto reply = fixture.client->Reserve(call, {absl::Seconds(5), {}});
  ASSERT_TRUE(reply.ok()) << reply.status();
  EXPECT_EQ(reply->transfer_id(), "t");
}

TEST(WorkerClientTest, NobodyThereSpoilsThePeer) {
  const auto client = ConnectWorker("127.0.0.1:1");
  const auto reply = client->Describe({absl::Seconds(5), {}});
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(FaultScopeOf(reply.status()), FaultScope::kPeer);
}

TEST(WorkerClientTest, ADeadlineEndsACall) {
  Fixture fixture;
  v1::ReserveCall call;
  call.set_num_prompt_tokens(99);
  const auto reply = fixture.client->Reserve(call, {absl::Milliseconds(50), {}});
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(WorkerClientTest, ACancellationReachesTheWorker) {
  Fixture fixture;
  v1::ReserveCall call;
  call.set_num_prompt_tokens(99);
  const auto reply = fixture.client->Reserve(call, {absl::Seconds(30), [] { return true; }});
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kCancelled);
  for (int i = 0; i < 2000 && !fixture.decode.was_cancelled; ++i) {
    RealClock().Sleep(absl::Milliseconds(1));
  }
  EXPECT_TRUE(fixture.decode.was_cancelled);
}

TEST(WorkerClientTest, ReadsStepsUntilTheStreamEnds) {
  Fixture fixture;
  v1::TokensHello hello;
  hello.set_router_incarnation(40);
  bool is_open = false;
  std::vector<uint64_t> seen;
  const absl::Status status = fixture.client->ReadTokens(
      hello, {absl::Seconds(5), {}}, [&] { is_open = true; },
      [&](const v1::StepTokens& step) { seen.push_back(step.sequences(0).first_index()); });
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_TRUE(is_open);
  EXPECT_THAT(seen, testing::ElementsAre(40, 41, 42));
}

TEST(RpcServerTest, RefusesATakenPort) {
  Fixture fixture;
  ScriptedDecode second;
  ServerOptions options;
  options.address = fixture.server->address();
  const auto started = RpcServer::Start(options, {&second});
  EXPECT_EQ(started.status().code(), absl::StatusCode::kUnavailable);
}

// The answer of grpc.health.v1 for `service`: 1 is SERVING, 2 NOT_SERVING, -1 an error. Debian
// ships no generated code for that service, so the two small messages are read and written by hand.
int HealthOf(const std::string& address, const std::string& service) {
  std::string request;
  if (!service.empty()) {  // Field 1, a string.
    request = std::string("\x0a") + static_cast<char>(service.size()) + service;
  }
  grpc::Slice slice(request);
  grpc::ByteBuffer payload(&slice, 1);
  grpc::GenericStub stub(OpenChannel(address));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  const auto call =
      stub.PrepareUnaryCall(&context, "/grpc.health.v1.Health/Check", payload, &queue);
  call->StartCall();
  grpc::ByteBuffer reply;
  grpc::Status status;
  call->Finish(&reply, &status, &context);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(status.ok() || status.error_code() == grpc::StatusCode::NOT_FOUND)
      << status.error_message();
  if (!status.ok() || !reply.Dump(&slices).ok() || slices.empty()) return -1;
  const std::string bytes(reinterpret_cast<const char*>(slices[0].begin()), slices[0].size());
  return bytes.size() == 2 && bytes[0] == 0x08 ? bytes[1] : -1;  // Field 1, an enum.
}

TEST(RpcServerTest, HealthTellsLivenessFromReadiness) {
  Fixture fixture;
  const std::string address = fixture.server->address();
  EXPECT_EQ(HealthOf(address, "liveness"), 1);
  EXPECT_EQ(HealthOf(address, "readiness"), 2);
  EXPECT_EQ(HealthOf(address, ""), 2);
  fixture.server->SetReady(true);
  EXPECT_EQ(HealthOf(address, "readiness"), 1);
  EXPECT_EQ(HealthOf(address, ""), 1);
  fixture.server->SetReady(false);
  EXPECT_EQ(HealthOf(address, "readiness"), 2);
  fixture.server->SetLive(false);
  EXPECT_EQ(HealthOf(address, "liveness"), 2);
  EXPECT_FALSE(fixture.server->is_live());
  EXPECT_EQ(HealthOf(address, "unknown"), -1);
}

TEST(RpcServerTest, AnswersToReflection) {
  Fixture fixture;
  // ServerReflectionRequest{list_services: "*"} and its stream, by hand for the same reason.
  grpc::Slice slice(std::string("\x3a\x01*"));
  const grpc::ByteBuffer request(&slice, 1);
  grpc::GenericStub stub(OpenChannel(fixture.server->address()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareCall(
      &context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", &queue);
  void* tag = nullptr;
  bool ok = false;
  const auto next = [&] { return queue.Next(&tag, &ok) && ok; };
  call->StartCall(&context);
  ASSERT_TRUE(next());
  call->Write(request, &context);
  ASSERT_TRUE(next());
  grpc::ByteBuffer reply;
  call->Read(&reply, &context);
  ASSERT_TRUE(next());
  grpc::Slice bytes;
  ASSERT_TRUE(reply.DumpToSingleSlice(&bytes).ok());
  EXPECT_THAT(std::string(reinterpret_cast<const char*>(bytes.begin()), bytes.size()),
              HasSubstr("isthmus.v1.DecodeService"));
  context.TryCancel();
  grpc::Status status;
  call->Finish(&status, &context);
  next();
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
}

TEST(ChannelTest, KnowsLoopbackAddresses) {
  EXPECT_TRUE(IsLoopback("127.0.0.1:0"));
  EXPECT_TRUE(IsLoopback("localhost:80"));
  EXPECT_TRUE(IsLoopback("[::1]:80"));
  EXPECT_FALSE(IsLoopback("0.0.0.0:80"));
  EXPECT_FALSE(IsLoopback("[::]:80"));
  EXPECT_FALSE(IsLoopback("10.0.0.1:80"));
}

TEST(ChannelTest, KnowsWhatCanBeDialled) {
  for (const char* good : {"127.0.0.1:1", "isthmus-router:7100", "[::1]:65535"}) {
    EXPECT_TRUE(IsHostPort(good)) << good;
  }
  for (const char* bad : {"", "x", ":1", "x:", "x:0", "x:65536", "x:http", "x:-1", "[::1]"}) {
    EXPECT_FALSE(IsHostPort(bad)) << bad;
  }
}

// Between machines whose clocks have nothing to do with each other.
TEST(WireTest, AnUrgencyKeepsItsAgeAndItsTimeLeft) {
  const absl::Time here = absl::FromUnixSeconds(1'000'000);
  const absl::Time there = absl::FromUnixSeconds(77);
  v1::ReserveCall call;
  SetUrgency({Priority::kLow, here + absl::Seconds(9), here - absl::Seconds(70)}, here, &call);
  Urgency read = UrgencyOf(call, there);
  EXPECT_EQ(read.priority, Priority::kLow);
  EXPECT_EQ(read.deadline, there + absl::Seconds(9));
  EXPECT_EQ(read.arrived, there - absl::Seconds(70));
  for (const int64_t seconds : {-5L, 100'000L}) {  // Whatever the other side has sent.
    call.mutable_waited()->set_seconds(seconds);
    read = UrgencyOf(call, there);
    EXPECT_EQ(read.arrived, there - (seconds < 0 ? absl::ZeroDuration() : absl::Hours(1)));
  }
  read = UrgencyOf(v1::PrefillCall(), there);
  EXPECT_EQ(read.arrived, there);
  EXPECT_EQ(read.deadline, absl::InfiniteFuture());
}

TEST(ChannelTest, ATimeoutShrinksAlongThePath) {
  EXPECT_EQ(HopTimeout(absl::Seconds(10), absl::Seconds(5)), absl::Milliseconds(4900));
  EXPECT_EQ(HopTimeout(absl::Milliseconds(10), absl::ZeroDuration()), absl::Milliseconds(9));
  EXPECT_EQ(HopTimeout(absl::Seconds(1), absl::Seconds(2)), absl::ZeroDuration());
}

TEST(MetricsExporterTest, ServesOnAFreePortAndRefusesATakenOne) {
  static constexpr MetricSpec kRequests = {.name = "isthmus_test_requests_total",
                                           .kind = MetricKind::kCounter,
                                           .help = "Requests.",
                                           .labels = {},
                                           .buckets = {}};
  static constexpr const MetricSpec* kSpecs[] = {&kRequests};
  MetricsExporter exporter("test", kSpecs);
  exporter.Add(kRequests, 2);
  const auto address = exporter.Listen("127.0.0.1:0");
  ASSERT_TRUE(address.ok()) << address.status();
  EXPECT_NE(*address, "127.0.0.1:0");
  MetricsExporter second("test", {});
  EXPECT_EQ(second.Listen(*address).status().code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace isthmus::rpc
