// SPDX-License-Identifier: Apache-2.0
// A client that leaves, in each phase of its request, and one that does not read: both workers'
// pages are free soon after, by acknowledgement and not because a lease ran out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include "absl/time/clock.h"
#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;

class DepartureTest : public ::testing::TestWithParam<Phase> {};

TEST_P(DepartureTest, FreesThePagesOfBothWorkers) {
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  HeldRequest held(&cluster, GetParam());
  ASSERT_TRUE(held.is_held());
  held.request().Leave();
  EXPECT_EQ(held.request().Wait().code(), absl::StatusCode::kCancelled);
  if (held.blocker() != nullptr) {
    EXPECT_TRUE(held.blocker()->Wait().ok());
  }
  absl::SleepFor(absl::Milliseconds(50));  // The departure meets the stopped worker.
  held.Release();
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
  EXPECT_TRUE(Serves(cluster));
}

INSTANTIATE_TEST_SUITE_P(EachPhase, DepartureTest,
                         ::testing::Values(Phase::kQueued, Phase::kPrefill, Phase::kTransfer,
                                           Phase::kHandover, Phase::kDecode),
                         [](const auto& param) { return std::string(PhaseName(param.param)); });

TEST(ClientTest, AProcessThatDiesIsADepartureToo) {
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  const TemporaryFolder folder;
  ClientProgram client(ISTHMUS_CTL_BINARY, folder.path(),
                       {"--server", cluster.router().address(), "generate", "--max-tokens", "2000",
                        "--text", "A long story."});
  ASSERT_TRUE(WaitUntil(absl::Seconds(10), [&] {
    return cluster.decode().Load().active_sequences() == 1;
  })) << cluster.Logs();
  client.Kill();
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
  EXPECT_TRUE(Serves(cluster));
}

TEST(ClientTest, OneThatDoesNotReadIsCancelledAndHoldsUpNobody) {
  ClusterOptions options = ScriptedPair();
  options.workers.push_back("scripted.step_time=0s");
  options.workers.push_back("scripted.prefill_token_time=0s");
  options.workers.push_back("cache_tokens=65536");
  options.router = {"max_active_requests=4", "max_behind_messages=64"};
  Cluster cluster(options);
  ASSERT_TRUE(cluster.WaitUntilReady());
  RunningRequest::Options hangs;
  hangs.reads = false;
  // Some 200 bytes a token: however slowly they are made, they outgrow what HTTP/2 keeps on the
  // way.
  v1::GenerateRequest asked = RequestOf(20, 50000);
  asked.mutable_sampling()->set_top_logprobs(20);
  RunningRequest slow(cluster.router().address(), asked, hangs);
  ASSERT_TRUE(
      WaitUntil(absl::Seconds(10), [&] { return cluster.decode().Load().transfers() > 0; }));
  EXPECT_TRUE(Serves(cluster));
  // Its pages come back although it never reads a word.
  EXPECT_TRUE(cluster.WaitUntilFree(absl::Seconds(30)));
  slow.ReadOn();
  // A server cannot say more to a client that does not read; the operator reads why.
  const absl::Status status = slow.Wait();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_THAT(cluster.router().program().Log(),
              HasSubstr("RESOURCE_EXHAUSTED: the client reads more slowly than tokens are made"));
  EXPECT_GT(slow.num_tokens(), 0);
  EXPECT_LT(slow.num_tokens(), 50000);
  EXPECT_TRUE(Serves(cluster));
}

}  // namespace
}  // namespace isthmus::testing
