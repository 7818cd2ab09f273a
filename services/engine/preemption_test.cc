// SPDX-License-Identifier: Apache-2.0
#include "services/engine/preemption.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "services/base/clock.h"
#include "services/model/scripted_forward.h"

namespace isthmus::engine {
namespace {

using ::testing::HasSubstr;

model::ScriptedOptions ScriptOf(int32_t max_tokens_per_step) {
  model::ScriptedOptions options;
  options.page_tokens = 128;
  options.vocab_size = 64;
  options.max_tokens_per_step = max_tokens_per_step;
  return options;
}

// A scripted engine with a pool of few pages of 128 tokens.
struct SmallEngine {
  SmallEngine(int64_t num_pages, int32_t num_slots, int32_t max_tokens_per_step = 1)
      : script(ScriptOf(max_tokens_per_step)),
        forward(*model::ScriptedForward::Create(script, clock)),
        pool(*kv::CachePool::Create(forward->layout(), num_pages * 128, num_slots)),
        engine(forward.get(), pool.get(), {.chunk_tokens = 50, .eos_token_id = 1}, {}),
        admission(pool.get(), {}, clock) {}

  Sequence Admit(size_t num_prompt_tokens, int64_t max_tokens, int32_t first = 7) {
    std::vector<int32_t> prompt(num_prompt_tokens, first);
    SamplingParams sampling;
    sampling.max_tokens = max_tokens;
    sampling.wants_logits_digests = true;
    auto sequence = engine.Admit("r", prompt, sampling);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return *std::move(sequence);
  }
  void Step(Sequence& sequence) {
    Sequence* const one = &sequence;
    const absl::Status reserved = ReserveStep(engine, {&one, 1});
    ASSERT_TRUE(reserved.ok()) << reserved;
    const absl::Status stepped = engine.Step({&one, 1});
    ASSERT_TRUE(stepped.ok()) << stepped;
  }

  SimulatedClock clock;
  const model::ScriptedOptions script;
  std::unique_ptr<model::ScriptedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  Engine engine;
  Admission admission;
};

// Preempted after every single step, and while it is being recomputed: the same tokens, draws and
// digests of logits.
TEST(PreemptionTest, DoesNotShowInTheOutput) {
  for (const int32_t tokens_per_step : {1, 4}) {
    SmallEngine small(8, 2, tokens_per_step);
    Sequence expected = small.Admit(300, 90);
    int num_steps = 0;
    for (; !expected.is_finished(); ++num_steps) small.Step(expected);
    for (int at = 1; at < num_steps; ++at) {
      Sequence sequence = small.Admit(300, 90);
      for (int step = 0; step < at; ++step) small.Step(sequence);
      for (int again = 0; again < 2; ++again) {
        const size_t num_tokens = sequence.tokens.size();
        Preempt(sequence);
        EXPECT_FALSE(sequence.cache.is_open());
        ASSERT_TRUE(Resume(small.engine, sequence).ok());
        small.Step(sequence);
        EXPECT_EQ(sequence.tokens.size(), num_tokens);
      }
      while (!sequence.is_finished()) small.Step(sequence);
      EXPECT_EQ(sequence.tokens, expected.tokens) << at;
      EXPECT_EQ(sequence.num_draws, expected.num_draws) << at;
      EXPECT_EQ(sequence.logits_crc32c, expected.logits_crc32c) << at;
      EXPECT_EQ(sequence.finish, expected.finish);
    }
  }
}

TEST(PreemptionTest, PagesGoToTheMoreUrgentFirst) {
  SmallEngine small(4, 3);
  std::vector<Sequence> all;
  for (int i = 0; i < 3; ++i) all.push_back(small.Admit(127, 100, 10 + i));
  for (Sequence& sequence : all) {
    while (sequence.num_output_tokens() < 2) small.Step(sequence);
  }
  // Each is at the end of its page, and one page is free.
  all[1].urgency.priority = Priority::kHigh;
  Sequence* running[] = {&all[0], &all[1], &all[2]};
  const absl::Status status = ReserveStep(small.engine, running);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(all[0].cache.capacity_tokens(), 128);
  EXPECT_EQ(all[1].cache.capacity_tokens(), 256);
  EXPECT_EQ(all[2].cache.capacity_tokens(), 128);
  Preempt(all[2]);
  EXPECT_TRUE(ReserveStep(small.engine, {running, 2}).ok());
  EXPECT_EQ(Resume(small.engine, all[2]).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(all[2].cache.is_open());
  small.pool->CheckConservation();
}

TEST(PreemptionTest, ASequenceThatOutgrowsTheWholePoolHearsBothNumbers) {
  SmallEngine small(2, 2);
  Sequence sequence = small.Admit(255, 100);
  while (sequence.tokens.size() < 256) small.Step(sequence);
  EXPECT_TRUE(CheckFitsAlone(small.engine, sequence).ok());
  small.Step(sequence);
  const absl::Status status = CheckFitsAlone(small.engine, sequence);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(status.message(), HasSubstr("257 tokens want 3 pages, the whole pool has 2"));
}

TEST(PreemptionTest, ResumesWhenTheClaimsOfOthersLeaveRoom) {
  SmallEngine small(6, 4);
  Sequence sequence = small.Admit(200, 300);
  sequence.claim = *small.admission.Admit({200, 300});
  while (sequence.num_output_tokens() < 3) small.Step(sequence);
  Preempt(sequence);
  EXPECT_EQ(sequence.num_once_cached, 202);
  // Holds one page and may want three more, out of six.
  Demand demand = {100, 800};
  demand.urgency.priority = Priority::kHigh;
  {
    const auto other = small.admission.Admit(demand);
    ASSERT_TRUE(other.ok()) << other.status();
    Sequence holder = small.Admit(100, 800);
    EXPECT_EQ(Resume(small.engine, sequence).code(), absl::StatusCode::kResourceExhausted);
  }
  EXPECT_TRUE(Resume(small.engine, sequence).ok());
  EXPECT_GE(sequence.cache.capacity_tokens(), 204);
}

}  // namespace
}  // namespace isthmus::engine
