// SPDX-License-Identifier: Apache-2.0
// Who may join a cluster: workers that differ are refused with both values; a restarted worker
// takes its predecessor's place at once.
#include <gmock/gmock.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <list>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/cluster.grpc.pb.h"
#include "services/base/version.h"
#include "services/rpc/channel.h"
#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// A pair with the bundled model, for workers that do not fit to it.
class RefusalTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(cluster_.WaitUntilReady()); }
  // Starts a decode worker that differs, and sees both values where an operator looks.
  void Expect(const Assignments& difference, const std::string& what, const std::string& value,
              const std::string& its_value) {
    Member& worker = cluster_.Add(Role::kDecode, difference);
    ASSERT_TRUE(cluster_.WaitForProblem(what));
    const auto status = cluster_.client().Status(absl::Seconds(5));
    ASSERT_TRUE(status.ok()) << status.status();
    std::string problem;
    for (const v1::WorkerStatus& one : status->workers()) {
      if (one.address() == worker.address()) problem = one.problem();
    }
    EXPECT_THAT(problem, AllOf(HasSubstr("refused"), HasSubstr(what), HasSubstr(value),
                               HasSubstr(its_value)));
    // The worker says it too.
    EXPECT_TRUE(WaitUntil(absl::Seconds(10), [&] {
      return worker.program().Log().find(what) != std::string::npos;
    })) << worker.program().Log();
    EXPECT_TRUE(status->is_ready());
    worker.Kill();
  }
  std::string LayoutOf(Member& worker) {
    const auto described = worker.Describe();
    return described.ok()
               ? absl::StrFormat("%016x", described->card().values().layout_fingerprint())
               : "";
  }

  Cluster cluster_{ClusterOptions()};
};

TEST_F(RefusalTest, WorkersThatDifferAreRefusedWithBothValues) {
  Expect({"model.index_topk=4"}, "model.index_topk differs", "is 4", "64");
  Expect({"arithmetic=math"}, "arithmetic differs", "is math", "reference");
  Expect({"model.index_key_format=fp8"}, "model.index_key_format differs", "is fp8", "fp4");
  Expect({"page_tokens=128"}, "layout fingerprint", LayoutOf(cluster_.decode()), "is ");
  // Another checkpoint: the same one with another number in its config.json.
  const TemporaryFolder folder;
  for (const auto& entry : std::filesystem::directory_iterator(BundledCheckpoint())) {
    std::filesystem::create_symlink(entry.path(),
                                    folder.path() + "/" + entry.path().filename().string());
  }
  const std::string path = folder.path() + "/config.json";
  nlohmann::json config = nlohmann::json::parse(std::ifstream(path));
  config["rms_norm_eps"] = 1.5e-6;
  std::filesystem::remove(path);
  std::ofstream(path) << config.dump();
  Expect({"checkpoint=" + folder.path()}, "checkpoint fingerprint differs", "is ", "that of");
  EXPECT_TRUE(cluster_.WaitUntilFree(kAcknowledgedPatience));
}

TEST_F(RefusalTest, AnotherProtocolVersionIsRefusedWithBothValues) {
  v1::WorkerReport report;
  *report.mutable_card() = cluster_.decode().Describe()->card();
  report.mutable_card()->set_incarnation(77);
  report.mutable_card()->set_address("127.0.0.1:1");
  report.mutable_card()->set_protocol_version(kProtocolVersion + 6);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  const auto stub = v1::Registration::NewStub(rpc::OpenChannel(cluster_.router().address()));
  const auto stream = stub->Register(&context);
  stream->Write(report);
  v1::RouterCommand command;
  EXPECT_FALSE(stream->Read(&command));
  const grpc::Status status = stream->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_THAT(status.error_message(),
              AllOf(HasSubstr("protocol version"), HasSubstr(absl::StrCat(kProtocolVersion)),
                    HasSubstr(absl::StrCat(kProtocolVersion + 6))));
  EXPECT_TRUE(cluster_.WaitForProblem("protocol version differs"));
}

TEST(SilenceTest, StreamsThatSayNothingTakeNoThreadOfARequest) {
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  std::list<grpc::ClientContext> contexts;
  std::vector<
      std::unique_ptr<grpc::ClientReaderWriterInterface<v1::WorkerReport, v1::RouterCommand>>>
      streams;
  const auto stub = v1::Registration::NewStub(rpc::OpenChannel(cluster.router().address()));
  for (int i = 0; i < 300; ++i) {
    grpc::ClientContext& context = contexts.emplace_back();
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
    streams.push_back(stub->Register(&context));
  }
  v1::RouterCommand command;
  EXPECT_FALSE(streams.back()->Read(&command));  // Refused at once, and all are there.
  EXPECT_TRUE(Serves(cluster));
  for (grpc::ClientContext& context : contexts) context.TryCancel();
  for (const auto& stream : streams) stream->Finish();
}

TEST(RestartTest, ASuccessorAtTheSameAddressServesAtOnce) {
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  EXPECT_TRUE(Serves(cluster));
  for (Role role : {Role::kDecode, Role::kPrefill, Role::kDecode}) {
    Member& worker = cluster.member(role);
    const uint64_t before = worker.Describe()->card().incarnation();
    worker.Kill();
    worker.Restart();
    ASSERT_TRUE(cluster.WaitUntilReady());
    EXPECT_NE(worker.Describe()->card().incarnation(), before);
    EXPECT_TRUE(Serves(cluster));
    const auto status = cluster.client().Status(absl::Seconds(5));
    ASSERT_TRUE(status.ok());
    EXPECT_EQ(status->workers_size(), 2) << status->DebugString();
  }
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
}

TEST(RestartTest, ARestartedRouterFindsItsWorkersAgain) {
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  cluster.router().Kill();
  cluster.router().Restart();
  ASSERT_TRUE(cluster.WaitUntilReady());
  EXPECT_TRUE(Serves(cluster));
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
}

}  // namespace
}  // namespace isthmus::testing
