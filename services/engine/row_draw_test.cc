// SPDX-License-Identifier: Apache-2.0
// Rows that the forward pass draws from itself: which ones it may, and that a reply is the same.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "kernels/sampling/sampling.h"
#include "services/engine/engine.h"

namespace isthmus::engine {
namespace {

constexpr int64_t kVocab = 16;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Logits are a function of the last two tokens. Where it draws, nobody sees them.
class DrawingForward : public model::Forward {
 public:
  explicit DrawingForward(bool draws) : draws_(draws) {
    kernels::KvGeometry geometry;
    geometry.compress_ratios = {0, 4};
    layout_ = *kernels::KvLayout::Create(geometry);
  }

  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec&) override {
    EXPECT_EQ(batch.draws.size(), batch.logit_rows.size());
    EXPECT_EQ(batch.drawn.size(), batch.logit_rows.size());
    for (size_t r = 0; r < batch.logit_rows.size(); ++r) {
      float* row = batch.logits.f32(static_cast<int64_t>(r));
      const auto t = static_cast<size_t>(batch.logit_rows[r]);
      for (int64_t id = 0; id < kVocab; ++id) {
        row[id] = is_broken ? kNan : std::sin(static_cast<float>((batch.tokens[t] + 3) * (id + 2)));
      }
      EXPECT_EQ(batch.drawn[r], model::kNotDrawn);
      const std::optional<model::RowDraw>& draw = batch.draws[r];
      if (!draws_ || !draw.has_value()) continue;
      ++num_draws;
      const absl::StatusOr<int32_t> token =
          kernels::Sample({.logits = kernels::F32Vector(row, kVocab),
                           .temperature = draw->temperature,
                           .top_p = draw->top_p,
                           .top_k = draw->top_k,
                           .min_p = draw->min_p,
                           .seed = draw->seed,
                           .counter = draw->counter},
                          kernels::Exec{});
      batch.drawn[r] = token.value_or(-1);
      std::fill_n(row, kVocab, kNan);
    }
    return absl::OkStatus();
  }
  int64_t vocab_size() const override { return kVocab; }
  int64_t max_positions() const override { return 600; }
  const kernels::KvLayout& layout() const override { return layout_; }

  int num_draws = 0;
  bool is_broken = false;

 private:
  const bool draws_;
  kernels::KvLayout layout_;
};

struct DrawingEngine {
  explicit DrawingEngine(bool draws)
      : forward(draws),
        pool(*kv::CachePool::Create(forward.layout(), 16 * 256, 16)),
        engine(&forward, pool.get(), {.chunk_tokens = 8, .eos_token_id = 1}, {}) {}

  // All together, to their ends.
  std::vector<Sequence> Run(const std::vector<SamplingParams>& params) {
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < params.size(); ++i) {
      const std::vector<int32_t> prompt(3 + 4 * i, static_cast<int32_t>(i % 7));
      sequences.push_back(*engine.Admit("r", prompt, params[i]));
    }
    while (true) {
      std::vector<Sequence*> running;
      for (Sequence& s : sequences) {
        if (!s.is_finished()) running.push_back(&s);
      }
      if (running.empty()) return sequences;
      const absl::Status status = engine.Step(running);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) return sequences;
    }
  }

  DrawingForward forward;
  std::unique_ptr<kv::CachePool> pool;
  Engine engine;
};

TEST(RowDrawTest, RepliesAreTheSameWhoeverDraws) {
  const SamplingParams plain = {.max_tokens = 12};
  SamplingParams sampled = {.temperature = 1.0f, .top_p = 0.9f, .seed = 7, .max_tokens = 20};
  SamplingParams penalised = sampled;
  penalised.repetition_penalty = 1.3f;
  SamplingParams told = plain;
  told.top_logprobs = 2;
  SamplingParams prompt_told = sampled;
  prompt_told.top_prompt_logprobs = 1;
  SamplingParams digested = sampled;
  digested.wants_logits_digests = true;
  SamplingParams least = sampled;
  least.min_tokens = 5;
  SamplingParams stopped = sampled;
  stopped.stop_token_ids = {2, 3, 5};
  SamplingParams several = sampled;
  several.further_seeds = {8, 9};
  const std::vector<SamplingParams> params = {plain,    sampled, penalised, told,   prompt_told,
                                              digested, least,   stopped,   several};
  DrawingEngine on_host(false);
  DrawingEngine in_pass(true);
  const std::vector<Sequence> want = on_host.Run(params);
  const std::vector<Sequence> got = in_pass.Run(params);
  for (size_t i = 0; i < params.size(); ++i) {
    EXPECT_EQ(got[i].tokens, want[i].tokens) << i;
    EXPECT_EQ(got[i].finish, want[i].finish) << i;
    EXPECT_EQ(got[i].num_draws, want[i].num_draws) << i;
    EXPECT_EQ(got[i].logits_crc32c, want[i].logits_crc32c) << i;
    EXPECT_EQ(got[i].logprobs, want[i].logprobs) << i;
    EXPECT_EQ(got[i].prompt_logprobs, want[i].prompt_logprobs) << i;
    EXPECT_EQ(got[i].further_first.size(), want[i].further_first.size()) << i;
  }
  EXPECT_EQ(on_host.forward.num_draws, 0);
  EXPECT_GT(in_pass.forward.num_draws, 12);
}

TEST(RowDrawTest, ARowWithoutAFiniteLogitIsTheErrorOfTheHost) {
  std::string messages[2];
  for (const bool draws : {false, true}) {
    DrawingEngine one(draws);
    one.forward.is_broken = true;
    Sequence s = *one.engine.Admit("r", {5}, {.max_tokens = 4});
    Sequence* const sequence = &s;
    const absl::Status status = one.engine.Step({&sequence, 1});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(s.tokens.size(), 1u);
    EXPECT_EQ(s.cache.num_tokens(), 0);
    EXPECT_EQ(one.forward.num_draws, draws ? 1 : 0);
    messages[draws ? 1 : 0] = std::string(status.message());
  }
  EXPECT_NE(messages[0].find("none of the 16 logits is finite"), std::string::npos) << messages[0];
  EXPECT_EQ(messages[0], messages[1]);
}

TEST(RowDrawTest, OnlyWhatDependsOnTheLogitsAlone) {
  const auto may = [](const SamplingParams& sampling, size_t num_output = 3) {
    Sequence sequence;
    sequence.tokens.resize(2 + num_output, 4);
    sequence.num_prompt_tokens = 2;
    sequence.num_draws = num_output;
    sequence.sampling = sampling;
    return DrawOf(sequence).has_value();
  };
  EXPECT_TRUE(may({}));
  EXPECT_TRUE(may({.temperature = 1.0f, .top_p = 0.5f, .top_k = 3, .min_p = 0.1f}));
  EXPECT_TRUE(may({.stop_token_ids = {5}}));
  EXPECT_TRUE(may({.min_tokens = 4}));
  EXPECT_FALSE(may({.min_tokens = 5}));
  EXPECT_FALSE(may({.repetition_penalty = 1.1f}));
  EXPECT_FALSE(may({.frequency_penalty = 0.1f}));
  EXPECT_FALSE(may({.presence_penalty = 0.1f}));
  EXPECT_FALSE(may({.logit_bias = {{5, 1.0f}}}));
  EXPECT_FALSE(may({.banned_token_ids = {5}}));
  EXPECT_FALSE(may({.top_logprobs = 0}));
  EXPECT_TRUE(may({.top_prompt_logprobs = 0}));  // Other rows.
  EXPECT_FALSE(may({.wants_logits_digests = true}));
  EXPECT_TRUE(may({.further_seeds = {3}}));
  EXPECT_FALSE(may({.further_seeds = {3}}, 0));
}

TEST(RowDrawTest, CarriesWhatTheSamplerWouldDrawWith) {
  Sequence sequence;
  sequence.tokens = {1, 2, 3};
  sequence.num_prompt_tokens = 1;
  sequence.num_draws = 2;
  sequence.sampling = {
      .temperature = 0.5f, .top_p = 0.25f, .top_k = 9, .min_p = 0.125f, .seed = 77};
  const model::RowDraw draw = *DrawOf(sequence);
  EXPECT_EQ(draw.temperature, 0.5f);
  EXPECT_EQ(draw.top_p, 0.25f);
  EXPECT_EQ(draw.top_k, 9);
  EXPECT_EQ(draw.min_p, 0.125f);
  EXPECT_EQ(draw.seed, 77u);
  EXPECT_EQ(draw.counter, 2u);
}

}  // namespace
}  // namespace isthmus::engine
