// SPDX-License-Identifier: Apache-2.0
// SIGTERM of each process in each phase of a request: what runs is finished, then the process ends
// with 0.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <tuple>

#include "absl/time/clock.h"
#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;
using DrainCase = std::tuple<Role, Phase>;

class DrainTest : public ::testing::TestWithParam<DrainCase> {};

TEST_P(DrainTest, FinishesWhatRunsAndEndsWithZero) {
  const auto [role, phase] = GetParam();
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  HeldRequest held(&cluster, phase);
  ASSERT_TRUE(held.is_held());
  ServerProgram& program = cluster.member(role).program();
  program.Signal(SIGTERM);
  // Nobody leaves while a peer counts on it.
  const bool is_needed =
      phase != Phase::kQueued &&
      !(role == Role::kPrefill && (phase == Phase::kHandover || phase == Phase::kDecode));
  EXPECT_FALSE(is_needed && program.WaitForExit(absl::Milliseconds(100)).has_value())
      << program.Log();
  held.Release();
  const absl::Status status = held.request().Wait();
  if (phase == Phase::kQueued && role != Role::kRouter) {
    // Not begun, and there is no other worker of that role.
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(held.request().num_tokens(), 0);
  } else {
    EXPECT_TRUE(status.ok()) << status << cluster.Logs();
  }
  if (held.blocker() != nullptr) {
    EXPECT_TRUE(held.blocker()->Wait().ok()) << held.blocker()->Wait() << cluster.Logs();
  }
  EXPECT_TRUE(held.HasRightTokens());
  EXPECT_EQ(program.WaitForExit(absl::Seconds(10)), 0) << program.Log();
  EXPECT_THAT(program.Log(), HasSubstr("\"msg\":\"stopped\""));
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
  cluster.member(role).Restart();
  ASSERT_TRUE(cluster.WaitUntilReady());
  EXPECT_TRUE(Serves(cluster));
}

INSTANTIATE_TEST_SUITE_P(
    EachPhase, DrainTest,
    ::testing::Combine(::testing::Values(Role::kRouter, Role::kPrefill, Role::kDecode),
                       ::testing::Values(Phase::kQueued, Phase::kPrefill, Phase::kTransfer,
                                         Phase::kHandover, Phase::kDecode)),
    [](const auto& param) {
      return std::string(RoleName(std::get<0>(param.param))) + "In" +
             PhaseName(std::get<1>(param.param));
    });

TEST(DrainTwoTest, AWorkerThatDrainsGetsNothingMoreAndTheOtherServes) {
  ClusterOptions options = ScriptedPair();
  options.num_prefill = 2;
  options.num_decode = 2;
  options.router = {"max_active_requests=4"};
  Cluster cluster(options);
  ASSERT_TRUE(cluster.WaitUntilReady());
  RunningRequest running(cluster.router().address(), RequestOf(300, 60));
  ASSERT_TRUE(running.WaitForTokens(3, absl::Seconds(10))) << cluster.Logs();
  // Both of one role and one of the other, whichever the request is on.
  for (Member* member : {&cluster.prefill(0), &cluster.decode(0)})
    member->program().Signal(SIGTERM);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Serves(cluster));
  EXPECT_TRUE(running.Wait().ok()) << running.Wait();
  for (Member* member : {&cluster.prefill(0), &cluster.decode(0)}) {
    EXPECT_EQ(member->program().WaitForExit(absl::Seconds(10)), 0) << member->program().Log();
  }
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
  EXPECT_TRUE(Serves(cluster));
}

}  // namespace
}  // namespace isthmus::testing
