// SPDX-License-Identifier: Apache-2.0
#include "services/engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>

namespace isthmus::engine {
namespace {

// Sequences by name, so that plans can be compared with a list.
class Batch {
 public:
  Sequence* AddPrompt(const std::string& name, size_t num_tokens) {
    auto sequence = std::make_unique<Sequence>();
    sequence->request_id = name;
    sequence->tokens.assign(num_tokens, 2);
    sequence->num_prompt_tokens = static_cast<int64_t>(num_tokens);
    all.push_back(sequence.get());
    owned.push_back(std::move(sequence));
    return all.back();
  }
  // Its pending token is an output; the cache of a test is always empty.
  void AddReply(const std::string& name) { AddPrompt(name, 1)->num_prompt_tokens = 0; }

  using Plan = std::vector<std::pair<std::string, int64_t>>;
  Plan Step(int64_t chunk_tokens, int64_t max_prompt_tokens) {
    Plan plan;
    ++step;
    for (const StepPart& part : PlanStep(all, chunk_tokens, max_prompt_tokens)) {
      plan.emplace_back(part.sequence->request_id, part.num_rows);
      part.sequence->last_step = step;
    }
    return plan;
  }

  std::vector<Sequence*> all;
  std::vector<std::unique_ptr<Sequence>> owned;
  uint64_t step = 0;
};

TEST(PlanStepTest, RepliesAlwaysTakePart) {
  Batch batch;
  for (const char* name : {"a", "b", "c"}) batch.AddReply(name);
  EXPECT_EQ(batch.Step(8, 1), (Batch::Plan{{"a", 1}, {"b", 1}, {"c", 1}}));
}

TEST(PlanStepTest, AloneAPromptGetsItsChunk) {
  Batch batch;
  batch.AddPrompt("long", 1000);
  EXPECT_EQ(batch.Step(100, 512), (Batch::Plan{{"long", 100}}));
  EXPECT_EQ(batch.Step(600, 512), (Batch::Plan{{"long", 512}}));
}

TEST(PlanStepTest, ALongPromptLeavesRoomForShortOnes) {
  Batch batch;
  batch.AddPrompt("long", 10000);
  batch.AddReply("reply");
  batch.AddPrompt("short", 20);
  batch.AddPrompt("middle", 300);
  // 200 for the first one; 66 at most for each; the first one gets what the short one leaves.
  EXPECT_EQ(batch.Step(400, 400),
            (Batch::Plan{{"long", 314}, {"reply", 1}, {"short", 20}, {"middle", 66}}));
}

TEST(PlanStepTest, TheMostUrgentPromptGetsMoreThanHalf) {
  Batch batch;
  for (const char* name : {"a", "b", "c"}) batch.AddPrompt(name, 10000);
  batch.AddPrompt("high", 10000)->urgency.priority = Priority::kHigh;
  EXPECT_EQ(batch.Step(400, 400), (Batch::Plan{{"a", 50}, {"b", 50}, {"c", 50}, {"high", 250}}));
}

TEST(PlanStepTest, InAClassTheNearestDeadlineGoesFirst) {
  Batch batch;
  batch.AddPrompt("later", 10000)->urgency.deadline = absl::UnixEpoch() + absl::Seconds(20);
  batch.AddPrompt("soon", 10000)->urgency.deadline = absl::UnixEpoch() + absl::Seconds(10);
  EXPECT_EQ(batch.Step(400, 400), (Batch::Plan{{"later", 100}, {"soon", 300}}));
}

TEST(PlanStepTest, AReplyThatIsRecomputedSharesThePromptsBudget) {
  Batch batch;
  Sequence* const preempted = batch.AddPrompt("preempted", 700);
  preempted->num_prompt_tokens = 600;
  batch.AddReply("reply");
  EXPECT_EQ(batch.Step(256, 512), (Batch::Plan{{"preempted", 256}, {"reply", 1}}));
}

TEST(PlanStepTest, AChunkEndsAtAWantedBoundary) {
  Batch batch;
  batch.AddPrompt("a", 1000)->wanted_boundary = 128;
  batch.AddPrompt("b", 1000)->wanted_boundary = 384;
  EXPECT_EQ(batch.Step(300, 1024), (Batch::Plan{{"a", 128}, {"b", 300}}));
}

// The rules of scheduler.h over random batches: no token too many, every reply has its turn, the
// budget is used up, and under any choice of urgencies each prompt moves again soon.
TEST(PlanStepTest, KeepsItsRulesWhateverTheBatch) {
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    std::mt19937 random(seed);
    Batch batch;
    const int num_prompts = 1 + static_cast<int>(random() % 12);
    for (int i = 0; i < num_prompts; ++i) {
      Sequence* const prompt = batch.AddPrompt("p" + std::to_string(i), 2 + random() % 500);
      prompt->urgency.priority = static_cast<Priority>(random() % 3);
      prompt->wanted_boundary = static_cast<int64_t>(random() % 600);
    }
    for (uint32_t i = 0; i < random() % 5; ++i) batch.AddReply("r" + std::to_string(i));
    const auto chunk = static_cast<int64_t>(1 + random() % 300);
    const auto budget = static_cast<int64_t>(1 + random() % 600);
    std::map<std::string, int> last;
    for (int step = 1; step <= 2 * num_prompts + 2; ++step) {
      std::map<std::string, int64_t> rows;
      for (const auto& [name, count] : batch.Step(chunk, budget)) rows[name] = count;
      int64_t wanted = 0;
      int64_t given = 0;
      for (const Sequence* sequence : batch.all) {
        const int64_t own = rows[sequence->request_id];
        if (sequence->num_prompt_tokens == 0) {
          EXPECT_EQ(own, 1) << seed;
          continue;
        }
        int64_t most = std::min(chunk, sequence->num_pending());
        if (sequence->wanted_boundary > 0) most = std::min(most, sequence->wanted_boundary);
        EXPECT_LE(own, most) << seed;
        wanted += most;
        given += own;
        if (own > 0) last[sequence->request_id] = step;
        EXPECT_GE(last[sequence->request_id], step - num_prompts) << seed;
      }
      EXPECT_EQ(given, std::min(wanted, budget)) << seed;
    }
  }
}

// Rows with logits of their own are few, whatever there is of others: half for the most urgent, the
// rest by turns.
TEST(PlanStepTest, PromptsShareTheRowsThatHaveLogits) {
  Batch batch;
  for (const char* name : {"a", "b", "c"}) {
    batch.AddPrompt(name, 500)->sampling.top_prompt_logprobs = 1;
  }
  batch.AddPrompt("plain", 500);
  const Batch::Plan plan = batch.Step(512, 2048);
  int64_t with_logits = 0;
  for (const auto& [name, rows] : plan) {
    EXPECT_GT(rows, 0) << name;
    with_logits += name == "plain" ? 0 : rows;
    EXPECT_TRUE(name != "plain" || rows == 500);
  }
  EXPECT_EQ(plan.size(), 4u);
  EXPECT_EQ(with_logits, kMaxPromptLogitRows);
  EXPECT_GE(plan[0].second, kMaxPromptLogitRows / 2);

  // More of them than such rows: none waits for ever.
  Batch many;
  std::map<std::string, int> last;
  for (int i = 0; i < 100; ++i) {
    many.AddPrompt(std::to_string(i), 500)->sampling.top_prompt_logprobs = 0;
  }
  for (int step = 1; step <= 12; ++step) {
    int64_t rows = 0;
    for (const auto& [name, own] : many.Step(512, 2048)) {
      rows += own;
      last[name] = step;
    }
    EXPECT_EQ(rows, kMaxPromptLogitRows);
  }
  EXPECT_EQ(last.size(), 100u);
}

TEST(PlanStepTest, MorePromptsThanTokensTakeTurns) {
  Batch batch;
  for (int i = 0; i < 7; ++i) batch.AddPrompt(std::to_string(i), 50);
  std::map<std::string, int> last;
  for (int step = 1; step <= 30; ++step) {
    int64_t num_rows = 0;
    // One for the most urgent, two for those whose turn it is.
    for (const auto& [name, rows] : batch.Step(8, 3)) {
      num_rows += rows;
      last[name] = step;
    }
    EXPECT_EQ(num_rows, 3);
    for (int i = 0; i < 7; ++i) EXPECT_GE(last[std::to_string(i)], step - 4) << i;
  }
}

}  // namespace
}  // namespace isthmus::engine
