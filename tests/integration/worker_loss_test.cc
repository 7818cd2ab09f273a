// SPDX-License-Identifier: Apache-2.0
// SIGKILL of each process in each phase of a request: one clear end for the client, no page stays
// taken, and who is left serves the next request with whoever comes in place of the dead.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

using LossCase = std::tuple<Role, Phase>;

class LossTest : public ::testing::TestWithParam<LossCase> {};

// A request whose pages are with the decode worker does not need its prefill worker any more.
bool Survives(Role victim, Phase phase) {
  return victim == Role::kPrefill && (phase == Phase::kHandover || phase == Phase::kDecode);
}

TEST_P(LossTest, EndsTheRequestOnceAndTakesNoPageAlong) {
  const auto [victim, phase] = GetParam();
  Cluster cluster(ScriptedPair());
  ASSERT_TRUE(cluster.WaitUntilReady());
  HeldRequest held(&cluster, phase);
  ASSERT_TRUE(held.is_held());
  const absl::Time start = absl::Now();
  cluster.member(victim).Kill();
  // Whoever was stopped must not be what notices the death.
  if (victim == Role::kDecode) {
    const absl::Status status = held.request().Wait();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status << cluster.Logs();
    EXPECT_LT(absl::Now() - start, absl::Seconds(8));
  }
  held.Release();
  const absl::Status status = held.request().Wait();
  if (Survives(victim, phase)) {
    EXPECT_TRUE(status.ok()) << status << cluster.Logs();
  } else {
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status << cluster.Logs();
    // A router that a busy machine stops a moment late has sent its first token already.
    const bool may_be_late = victim == Role::kRouter && phase == Phase::kHandover;
    if (!may_be_late) {
      EXPECT_EQ(held.request().num_tokens() > 0, phase == Phase::kDecode);
    }
  }
  EXPECT_TRUE(held.HasRightTokens());
  EXPECT_TRUE(cluster.WaitUntilFree(kFreePatience));
  cluster.member(victim).Restart();
  ASSERT_TRUE(cluster.WaitUntilReady());
  EXPECT_TRUE(Serves(cluster));
  EXPECT_TRUE(cluster.WaitUntilFree(kAcknowledgedPatience));
}

INSTANTIATE_TEST_SUITE_P(EachPhase, LossTest,
                         ::testing::Combine(::testing::Values(Role::kRouter, Role::kPrefill,
                                                              Role::kDecode),
                                            ::testing::Values(Phase::kPrefill, Phase::kTransfer,
                                                              Phase::kHandover, Phase::kDecode)),
                         [](const auto& param) {
                           return std::string(RoleName(std::get<0>(param.param))) + "In" +
                                  PhaseName(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace isthmus::testing
