// SPDX-License-Identifier: Apache-2.0
#include "services/engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>
#include <memory>

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
  EXPECT_EQ(batch.Step(400, 400),
            (Batch::Plan{{"long", 247}, {"reply", 1}, {"short", 20}, {"middle", 133}}));
}

TEST(PlanStepTest, MorePromptsThanTokensTakeTurns) {
  Batch batch;
  for (int i = 0; i < 7; ++i) batch.AddPrompt(std::to_string(i), 50);
  std::map<std::string, int> last;
  for (int step = 1; step <= 30; ++step) {
    const Batch::Plan plan = batch.Step(8, 3);
    EXPECT_EQ(plan.size(), 3u);
    for (const auto& [name, rows] : plan) {
      EXPECT_EQ(rows, 1);
      last[name] = step;
    }
    for (int i = 0; i < 7; ++i) EXPECT_GE(last[std::to_string(i)], step - 3) << i;
  }
}

}  // namespace
}  // namespace isthmus::engine
