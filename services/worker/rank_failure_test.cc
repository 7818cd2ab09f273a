// SPDX-License-Identifier: Apache-2.0
// A rank that fails alone, or does not come back, ends the worker with a last word that names it.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "services/engine/rank_forward.h"
#include "services/worker/testing/worker_pair.h"
#include "services/worker/worker_plan.h"

namespace isthmus::worker {
namespace {

// A rank whose steps end as a test says; it computes nothing.
class OtherRank : public model::Forward {
 public:
  OtherRank(const model::Forward& first, absl::Status end, const std::atomic<bool>* hangs)
      : first_(first), end_(std::move(end)), hangs_(hangs) {}

  absl::Status Run(const model::ForwardBatch&, const kernels::Exec&) override {
    while (*hangs_) RealClock().Sleep(absl::Milliseconds(5));
    return end_;
  }
  int64_t vocab_size() const override { return first_.vocab_size(); }
  int64_t max_positions() const override { return first_.max_positions(); }
  const kernels::KvLayout& layout() const override { return first_.layout(); }

 private:
  const model::Forward& first_;
  const absl::Status end_;
  const std::atomic<bool>* const hangs_;
};

// Runs one reply on two ranks, of which the second ends its steps so, or hangs until the group is
// aborted.
void RunReply(const absl::Status& end, bool hangs) {
  const WorkerConfig config = ScriptedConfig();
  std::atomic<bool> is_hanging = hangs;
  auto first = *model::ScriptedForward::Create(ScriptedOptionsOf(config), RealClock());
  OtherRank second(*first, end, &is_hanging);
  std::vector<engine::Rank> ranks(2);
  ranks[0].forward = first.get();
  ranks[0].vocabulary = {0, first->vocab_size()};
  ranks[1].forward = &second;
  WorkerParts parts;
  transfer::LoopbackNetwork network;
  parts.transport = transfer::MakeLoopbackTransport(&network, "one");
  parts.forward = std::make_unique<engine::RankForward>(
      std::move(ranks), RealClock(), absl::Milliseconds(300),
      [&is_hanging](const absl::Status&) { is_hanging = false; });
  auto worker = *Worker::Assemble(config, v1::WORKER_ROLE_DECODE, std::move(parts), RealClock());
  StepLoop::Entry entry;
  engine::SamplingParams sampling;
  sampling.max_tokens = 3;
  entry.sequence = *worker->engine().Admit("r", std::vector<int32_t>(20, 5), sampling);
  entry.on_step = [](const engine::Sequence&, int64_t) { return true; };
  entry.on_end = [](const engine::Sequence&, const absl::Status&) {};
  entry.is_cancelled = std::make_shared<std::atomic<bool>>(false);
  ASSERT_TRUE(worker->loop().Submit(std::move(entry)).ok());
  EXPECT_TRUE(ComesTrue([&] { return worker->loop().num_sequences() == 0; }));
  worker->Stop();
}

class RankFailureDeathTest : public testing::Test {
 protected:
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(RankFailureDeathTest, ARankThatFailsAloneEndsTheWorker) {
  EXPECT_DEATH(RunReply(absl::InternalError("an illegal address"), false),
               "the device is lost: rank 1 of 2 failed alone: an illegal address");
}

TEST_F(RankFailureDeathTest, ARankThatDoesNotComeBackEndsTheWorker) {
  EXPECT_DEATH(RunReply(absl::AbortedError("aborted"), true),
               "the device is lost: rank 1 of 2 did not end its step within 300ms");
}

TEST_F(RankFailureDeathTest, RanksThatEndAlikeDoNot) { RunReply(absl::OkStatus(), false); }

}  // namespace
}  // namespace isthmus::worker
