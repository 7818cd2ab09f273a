// SPDX-License-Identifier: Apache-2.0
#include "services/engine/engine.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"

namespace isthmus::engine {
namespace {

constexpr int kVocab = 16;
constexpr int kEos = 1;

// Chooses (last token + 1) mod 16, and remembers what it was asked.
class CountingForward : public model::Forward {
 public:
  CountingForward() {
    kernels::KvGeometry geometry;
    geometry.compress_ratios = {0, 4};
    layout_ = *kernels::KvLayout::Create(geometry);
  }

  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec&) override {
    for (const kernels::SequenceKv& s : batch.sequences) step_rows.push_back(s.num_rows);
    if (fails) return absl::InternalError("scripted");
    for (size_t r = 0; r < batch.logit_rows.size(); ++r) {
      float* row = batch.logits.f32(static_cast<int64_t>(r));
      std::fill(row, row + kVocab, 0.0f);
      const int32_t last = batch.tokens[static_cast<size_t>(batch.logit_rows[r])];
      row[(last + 1) % kVocab] = 1.0f;
    }
    return absl::OkStatus();
  }
  int64_t vocab_size() const override { return kVocab; }
  int64_t max_positions() const override { return 600; }
  const kernels::KvLayout& layout() const override { return layout_; }

  std::vector<int64_t> step_rows;
  bool fails = false;

 private:
  kernels::KvLayout layout_;
};

class EngineTest : public testing::Test {
 protected:
  EngineTest()
      : pool_(*kv::CachePool::Create(forward_.layout(), 1024, 3)),
        engine_(&forward_, pool_.get(), {.chunk_tokens = 8, .eos_token_id = kEos}, {}) {}

  Sequence Admit(std::vector<int32_t> prompt, int64_t max_tokens) {
    SamplingParams sampling;
    sampling.max_tokens = max_tokens;
    return *engine_.Admit("r", std::move(prompt), sampling);
  }

  CountingForward forward_;
  std::unique_ptr<kv::CachePool> pool_;
  Engine engine_;
};

TEST_F(EngineTest, CutsAPromptIntoChunksAndThenDecodesOneByOne) {
  Sequence s = Admit(std::vector<int32_t>(20, 4), 3);
  Sequence* const one = &s;
  while (!s.is_finished()) ASSERT_TRUE(engine_.Step({&one, 1}).ok());
  EXPECT_EQ(forward_.step_rows, (std::vector<int64_t>{8, 8, 4, 1, 1}));
  EXPECT_EQ(s.num_output_tokens(), 3);
  EXPECT_EQ(s.tokens.back(), 7);
  EXPECT_EQ(s.finish, FinishReason::kLength);
  EXPECT_EQ(s.num_draws, 3u);
}

TEST_F(EngineTest, StopsAtTheEndToken) {
  Sequence s = Admit({14}, 100);
  Sequence* const one = &s;
  while (!s.is_finished()) ASSERT_TRUE(engine_.Step({&one, 1}).ok());
  EXPECT_EQ(s.tokens, (std::vector<int32_t>{14, 15, 0, kEos}));
  EXPECT_EQ(s.finish, FinishReason::kStop);
}

TEST_F(EngineTest, StepsSequencesOfDifferentPhasesTogether) {
  Sequence a = Admit({5}, 10);
  Sequence b = Admit(std::vector<int32_t>(10, 2), 10);
  Sequence* both[] = {&a, &b};
  ASSERT_TRUE(engine_.Step(both).ok());
  EXPECT_EQ(a.num_output_tokens(), 1);
  EXPECT_EQ(b.num_output_tokens(), 0);
  ASSERT_TRUE(engine_.Step(both).ok());
  EXPECT_EQ(a.tokens, (std::vector<int32_t>{5, 6, 7}));
  EXPECT_EQ(b.tokens.back(), 3);
  EXPECT_EQ(forward_.step_rows, (std::vector<int64_t>{1, 8, 1, 2}));
}

TEST_F(EngineTest, AFailedStepAdvancesNothing) {
  Sequence s = Admit({5}, 10);
  Sequence* const one = &s;
  forward_.fails = true;
  EXPECT_EQ(engine_.Step({&one, 1}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(s.cache.num_tokens(), 0);
  EXPECT_EQ(s.tokens.size(), 1u);
}

TEST_F(EngineTest, GivesEverythingBackWhenASequenceEnds) {
  { Sequence s = Admit(std::vector<int32_t>(300, 4), 3); }
  pool_->CheckConservation();
  EXPECT_EQ(pool_->slots().num_free(), 3);
  EXPECT_EQ(pool_->pages(kernels::kCsaKv).num_free(), 4);
}

struct BadInput {
  const char* what;
  std::vector<int32_t> prompt;
  SamplingParams sampling;
  const char* named;  // Must appear in the message.
};
void PrintTo(const BadInput& bad, std::ostream* out) { *out << bad.what; }

class EngineRefusalTest : public EngineTest, public testing::WithParamInterface<BadInput> {};

TEST_P(EngineRefusalTest, NamesTheField) {
  const auto admitted = engine_.Admit("r", GetParam().prompt, GetParam().sampling);
  ASSERT_EQ(admitted.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(admitted.status().message().find(GetParam().named), absl::string_view::npos)
      << admitted.status().message();
  EXPECT_EQ(pool_->slots().num_free(), 3);
}

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

INSTANTIATE_TEST_SUITE_P(
    BadInputs, EngineRefusalTest,
    testing::Values(BadInput{"empty prompt", {}, {}, "prompt"},
                    BadInput{"unknown id", {3, 16}, {}, "id 16"},
                    BadInput{"negative id", {-1}, {}, "id -1"},
                    BadInput{"longer than the model", std::vector<int32_t>(600, 2), {}, "600"},
                    BadInput{"no output", {1}, {.max_tokens = 0}, "max_tokens"},
                    BadInput{"NaN temperature", {1}, {.temperature = kNan}, "temperature"},
                    BadInput{
                        "infinite temperature", {1}, {.temperature = kInfinity}, "temperature"},
                    BadInput{"negative temperature", {1}, {.temperature = -1.0f}, "temperature"},
                    BadInput{"NaN top_p", {1}, {.temperature = 1.0f, .top_p = kNan}, "top_p"},
                    BadInput{"zero top_p", {1}, {.temperature = 1.0f, .top_p = 0.0f}, "top_p"},
                    BadInput{"negative top_k", {1}, {.temperature = 1.0f, .top_k = -1}, "top_k"}));

TEST_F(EngineTest, RefusesWhenThePoolIsEmptyAndRecovers) {
  Sequence a = Admit(std::vector<int32_t>(500, 4), 1);
  Sequence b = Admit(std::vector<int32_t>(500, 4), 1);
  const auto refused = engine_.Admit("r", std::vector<int32_t>(300, 4), {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  a = Sequence();
  EXPECT_TRUE(engine_.Admit("r", std::vector<int32_t>(300, 4), {}).ok());
}

}  // namespace
}  // namespace isthmus::engine
