// SPDX-License-Identifier: Apache-2.0
// A bit that flips in the decode worker's memory between the push and the hand-over: found by the
// digests, never half used. The test writes into the process from outside; the addresses are those
// of its card.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/uio.h>

#include "absl/time/clock.h"
#include "kernels/core/kv_layout.h"
#include "tests/integration/held_request.h"

namespace isthmus::testing {
namespace {

using ::testing::HasSubstr;

// Flips one bit in every unit of the worker's region. False: the system does not let us.
bool FlipBits(Member& worker, int region) {
  const auto described = worker.Describe();
  if (!described.ok()) return false;
  const v1::RegionCard& card = described->card().transfer().regions(region);
  for (uint64_t unit = 0; unit < card.num_units(); ++unit) {
    unsigned char byte = 0;
    const iovec local = {&byte, 1};
    const uint64_t offset = unit * card.unit_bytes() + card.unit_bytes() / 2;
    const iovec remote = {reinterpret_cast<void*>(card.base_address() + offset), 1};
    const pid_t pid = worker.program().pid();
    if (process_vm_readv(pid, &local, 1, &remote, 1, 0) != 1) return false;
    byte ^= 0x10;
    if (process_vm_writev(pid, &local, 1, &remote, 1, 0) != 1) return false;
  }
  return true;
}

// Runs a request whose pages are corrupted after they have been pushed.
class CorruptionTest : public ::testing::Test {
 protected:
  void Run(int max_attempts, int region) {
    ClusterOptions options = ScriptedPair();
    options.router.push_back("max_attempts=" + std::to_string(max_attempts));
    cluster_ = std::make_unique<Cluster>(options);
    ASSERT_TRUE(cluster_->WaitUntilReady());
    asked_ = RequestOf(400, 10);
    request_ = std::make_unique<RunningRequest>(cluster_->router().address(), asked_);
    ASSERT_TRUE(WaitUntil(absl::Seconds(10),
                          [this] { return cluster_->prefill().Load().transfers() == 1; }));
    cluster_->router().program().Signal(SIGSTOP);
    const bool is_pushed = WaitUntil(
        absl::Seconds(10), [this] { return cluster_->prefill().Load().transfers() == 0; });
    const bool is_flipped = FlipBits(cluster_->decode(), region);
    cluster_->router().program().Signal(SIGCONT);
    ASSERT_TRUE(is_pushed && is_flipped);
    status_ = request_->Wait();
  }

  std::unique_ptr<Cluster> cluster_;
  v1::GenerateRequest asked_;
  std::unique_ptr<RunningRequest> request_;
  absl::Status status_;
};

TEST_F(CorruptionTest, IsAClearLossForTheClientWhenNothingIsTriedAgain) {
  Run(1, 0);
  EXPECT_EQ(status_.code(), absl::StatusCode::kDataLoss) << status_;
  EXPECT_THAT(std::string(status_.message()), HasSubstr("digest of what arrived is"));
  EXPECT_EQ(request_->num_tokens(), 0);
  EXPECT_TRUE(cluster_->WaitUntilFree(kFreePatience));
  EXPECT_TRUE(Serves(*cluster_));
}

TEST_F(CorruptionTest, OfTheStateSlotIsFoundToo) {
  Run(1, kernels::kNumPagedKinds);
  EXPECT_EQ(status_.code(), absl::StatusCode::kDataLoss) << status_;
  EXPECT_TRUE(cluster_->WaitUntilFree(kFreePatience));
  EXPECT_TRUE(Serves(*cluster_));
}

TEST_F(CorruptionTest, CostsASecondTryAndNoWrongToken) {
  Run(3, 0);
  EXPECT_TRUE(status_.ok()) << status_;
  EXPECT_EQ(request_->tokens(), ScriptedTokens(asked_));
  EXPECT_THAT(cluster_->decode().program().Log(), HasSubstr("digest of what arrived is"));
  EXPECT_TRUE(cluster_->WaitUntilFree(kFreePatience));
}

}  // namespace
}  // namespace isthmus::testing
