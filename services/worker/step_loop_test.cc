// SPDX-License-Identifier: Apache-2.0
#include "services/worker/step_loop.h"

#include <gtest/gtest.h>

#include "services/base/fault.h"
#include "services/engine/preemption.h"
#include "services/worker/testing/worker_pair.h"

namespace isthmus::worker {
namespace {

TEST(StepLoopTest, AStepThatHangsIsNotLiveAndAnIdleLoopIs) {
  WorkerConfig config = ScriptedConfig();
  config.liveness_timeout = absl::Milliseconds(100);
  config.scripted_step_time = absl::Milliseconds(600);
  WorkerPair pair(config, ScriptedConfig());
  RealClock().Sleep(absl::Milliseconds(150));
  EXPECT_TRUE(pair.prefill->is_live());
  EXPECT_EQ(pair.prefill->loop().stalled_for(), absl::ZeroDuration());
  const TestRequest request = RequestOf(10);
  Thread thread(RealClock(), [&] { EXPECT_TRUE(pair.Begin(request).ok()); });
  EXPECT_TRUE(ComesTrue([&] { return !pair.prefill->is_live(); }));
  thread.Join();
  EXPECT_TRUE(pair.prefill->is_live());
}

TEST(StepLoopTest, ObserversSeeTheBatch) {
  std::vector<StepFigures> seen;
  WorkerConfig config = ScriptedConfig();
  config.scripted_step_time = absl::Milliseconds(2);
  transfer::LoopbackNetwork network;
  WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(&network, "one");
  parts.on_step = [&seen](const StepFigures& figures) { seen.push_back(figures); };
  auto worker = Worker::Assemble(config, v1::WORKER_ROLE_DECODE, std::move(parts), RealClock());
  ASSERT_TRUE(worker.ok()) << worker.status();
  for (int i = 0; i < 3; ++i) {
    StepLoop::Entry entry;
    engine::SamplingParams sampling;
    sampling.max_tokens = 20;
    entry.sequence = *(*worker)->engine().Admit("r", std::vector<int32_t>(200, 5), sampling);
    entry.on_step = [](const engine::Sequence&, int64_t) { return true; };
    entry.on_end = [](engine::Sequence ended, const absl::Status& status) {
      EXPECT_TRUE(status.ok()) << status;
      EXPECT_EQ(ended.num_output_tokens(), 20);
    };
    entry.is_cancelled = std::make_shared<std::atomic<bool>>(false);
    ASSERT_TRUE((*worker)->loop().Submit(std::move(entry)).ok());
  }
  EXPECT_TRUE(ComesTrue([&] { return (*worker)->loop().num_sequences() == 0; }));
  (*worker)->Stop();
  ASSERT_GE(seen.size(), 20u);
  EXPECT_EQ(seen[10].num_sequences, 3);
  EXPECT_GE(seen[10].duration, absl::Milliseconds(2));
}

// Of a reply that could not have pages of its own yet.
TEST(StepLoopTest, ASequenceWithoutPagesWaitsForThemAndRuns) {
  const WorkerConfig config = ScriptedConfig();
  transfer::LoopbackNetwork network;
  WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(&network, "one");
  auto worker = Worker::Assemble(config, v1::WORKER_ROLE_DECODE, std::move(parts), RealClock());
  ASSERT_TRUE(worker.ok()) << worker.status();
  StepLoop::Entry entry;
  engine::SamplingParams sampling;
  sampling.max_tokens = 20;
  entry.sequence = *(*worker)->engine().Admit("r", std::vector<int32_t>(200, 5), sampling);
  engine::Preempt(entry.sequence);
  entry.is_preemptible = true;
  entry.on_step = [](const engine::Sequence&, int64_t) { return true; };
  std::atomic<int64_t> num_output_tokens = 0;
  entry.on_end = [&](const engine::Sequence& ended, const absl::Status& status) {
    EXPECT_TRUE(status.ok()) << status;
    num_output_tokens = ended.num_output_tokens();
  };
  entry.is_cancelled = std::make_shared<std::atomic<bool>>(false);
  ASSERT_TRUE((*worker)->loop().Submit(std::move(entry)).ok());
  EXPECT_TRUE(ComesTrue([&] { return num_output_tokens == 20; }));
  EXPECT_EQ((*worker)->loop().num_preemptions(), 0);
  (*worker)->Stop();
}

// The only sequence gives way, so no step follows; metrics are fed by observers alone.
TEST(StepLoopTest, ObserversSeeAPreemptionAfterWhichNothingRuns) {
  std::atomic<int64_t> num_given_way = 0;
  std::atomic<int64_t> most_waiting = 0;
  WorkerConfig config = ScriptedConfig();
  config.cache_tokens = 4 * 128;
  config.scripted_step_time = absl::Milliseconds(20);
  transfer::LoopbackNetwork network;
  WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(&network, "one");
  parts.on_step = [&](const StepFigures& figures) {
    EXPECT_EQ(figures.num_preemptions, figures.num_given_way);
    num_given_way += figures.num_given_way;
    most_waiting = std::max<int64_t>(most_waiting, figures.num_preempted);
  };
  auto worker = Worker::Assemble(config, v1::WORKER_ROLE_DECODE, std::move(parts), RealClock());
  ASSERT_TRUE(worker.ok()) << worker.status();
  engine::Admission& admission = (*worker)->admission();
  engine::Demand demand = {.num_prompt_tokens = 300, .max_output_tokens = 80};
  demand.urgency.priority = Priority::kLow;
  StepLoop::Entry entry;
  engine::SamplingParams sampling;
  sampling.max_tokens = 80;
  auto claim = admission.Admit(demand);
  ASSERT_TRUE(claim.ok()) << claim.status();
  entry.sequence = *(*worker)->engine().Admit("r", std::vector<int32_t>(300, 5), sampling);
  entry.sequence.claim = *std::move(claim);
  entry.sequence.urgency = demand.urgency;
  entry.is_preemptible = true;
  entry.on_step = [](const engine::Sequence&, int64_t) { return true; };
  entry.on_end = [](engine::Sequence, const absl::Status& status) { EXPECT_TRUE(status.ok()); };
  entry.is_cancelled = std::make_shared<std::atomic<bool>>(false);
  ASSERT_TRUE((*worker)->loop().Submit(std::move(entry)).ok());
  demand = {.num_prompt_tokens = 300, .max_output_tokens = 1, .ask_id = 7};
  demand.urgency.priority = Priority::kHigh;
  // It asks once and does not come back, so that the room is kept for a while.
  ASSERT_TRUE(ComesTrue([&] { return HasRoomSoon(admission.Admit(demand).status()); }));
  EXPECT_TRUE(ComesTrue([&] { return most_waiting == 1; }));
  EXPECT_TRUE(ComesTrue([&] { return (*worker)->loop().num_sequences() == 0; }));
  (*worker)->Stop();
  EXPECT_EQ((*worker)->loop().num_preemptions(), 1);
  EXPECT_EQ(num_given_way, 1);
}

}  // namespace
}  // namespace isthmus::worker
