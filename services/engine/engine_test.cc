// SPDX-License-Identifier: Apache-2.0
#include "services/engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "services/base/crc32c.h"
#include "services/model/scripted_forward.h"

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

TEST_F(EngineTest, DigestsAreOfTheLogitsThatATokenWasDrawnFrom) {
  Sequence s = Admit({5}, 3);
  s.sampling.wants_logits_digests = true;
  Sequence* const one = &s;
  while (!s.is_finished()) ASSERT_TRUE(engine_.Step({&one, 1}).ok());
  ASSERT_EQ(s.logits_crc32c.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    std::vector<float> logits(kVocab, 0.0f);
    logits[6 + i] = 1.0f;
    EXPECT_EQ(s.logits_crc32c[i], Crc32c(logits.data(), logits.size() * sizeof(float)));
  }
}

TEST_F(EngineTest, PromptLogprobsComeRowByRowWhateverTheChunks) {
  std::vector<int32_t> prompt = {3};
  for (int32_t i = 0; i < 19; ++i) prompt.push_back((prompt.back() + (i % 5 == 4 ? 3 : 1)) % 16);
  SamplingParams sampling;
  sampling.max_tokens = 2;
  sampling.top_logprobs = 1;
  sampling.top_prompt_logprobs = 2;
  Sequence s = *engine_.Admit("r", prompt, sampling);
  Sequence* const one = &s;
  while (!s.is_finished()) ASSERT_TRUE(engine_.Step({&one, 1}).ok());
  ASSERT_EQ(s.prompt_logprobs.size(), prompt.size() - 1);
  for (size_t i = 1; i < prompt.size(); ++i) {
    const kernels::TokenLogprobs& logprobs = s.prompt_logprobs[i - 1];
    EXPECT_EQ(logprobs.chosen.id, prompt[i]) << i;
    EXPECT_EQ(logprobs.rank, prompt[i] == (prompt[i - 1] + 1) % 16 ? 1 : 2) << i;
    ASSERT_EQ(logprobs.top.size(), 2u);
    EXPECT_EQ(logprobs.top[0].id, (prompt[i - 1] + 1) % 16) << i;
  }
  ASSERT_EQ(s.logprobs.size(), 2u);
  EXPECT_EQ(s.logprobs[0].chosen.id, (prompt.back() + 1) % 16);
}

TEST_F(EngineTest, RefusesLogprobsOfATooLongPrompt) {
  class Wide : public CountingForward {
   public:
    int64_t max_positions() const override { return 100000; }
  };
  Wide wide;
  Engine engine(&wide, pool_.get(), {}, {});
  SamplingParams sampling;
  sampling.top_prompt_logprobs = 0;
  EXPECT_TRUE(engine.Validate(std::vector<int32_t>(32768, 3), sampling).ok());
  const absl::Status status = engine.Validate(std::vector<int32_t>(32769, 3), sampling);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("top_prompt_logprobs"), absl::string_view::npos) << status;
}

// Sequences of a scripted model that gains several tokens in a step.
class ScriptedEngine {
 public:
  explicit ScriptedEngine(model::ScriptedOptions scripted, const EngineOptions& engine_options = {})
      : options(std::move(scripted)),
        forward(*model::ScriptedForward::Create(options, clock)),
        pool(*kv::CachePool::Create(forward->layout(), 8192, 8)),
        engine(forward.get(), pool.get(), engine_options, {}) {}

  // Runs all prompts to their ends, together.
  std::vector<Sequence> Run(const std::vector<std::vector<int32_t>>& prompts,
                            const SamplingParams& sampling) {
    std::vector<Sequence> sequences;
    for (const auto& prompt : prompts) {
      auto admitted = engine.Admit("r", prompt, sampling);
      EXPECT_TRUE(admitted.ok()) << admitted.status();
      // As a decode worker reserves: not one page more is ever needed.
      const auto most = static_cast<int64_t>(prompt.size()) + sampling.max_tokens;
      EXPECT_TRUE(admitted->cache.Reserve(std::min(most, options.max_positions)).ok());
      sequences.push_back(*std::move(admitted));
    }
    while (true) {
      std::vector<Sequence*> running;
      for (Sequence& s : sequences) {
        if (!s.is_finished()) running.push_back(&s);
      }
      if (running.empty()) break;
      const absl::Status status = engine.Step(running);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
      ++num_steps;
    }
    return sequences;
  }

  std::vector<int32_t> Expected(const std::vector<int32_t>& prompt, int64_t max_tokens) const {
    std::vector<int32_t> all = prompt;
    const std::vector<int32_t> reply = model::ScriptedReply(options, prompt, max_tokens);
    all.insert(all.end(), reply.begin(), reply.end());
    return all;
  }

  SimulatedClock clock;
  const model::ScriptedOptions options;
  std::unique_ptr<model::ScriptedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  Engine engine;
  int num_steps = 0;
};

model::ScriptedOptions FourTokens() {
  model::ScriptedOptions options;
  options.vocab_size = 32;
  options.max_positions = 400;
  options.page_tokens = 128;
  options.max_tokens_per_step = 4;
  return options;
}

std::vector<int32_t> PromptOf(size_t size, int32_t first) {
  std::vector<int32_t> prompt(size);
  for (size_t i = 0; i < size; ++i) {
    prompt[i] = static_cast<int32_t>((static_cast<size_t>(first) + i) % 32);
  }
  return prompt;
}

TEST(EngineDraftTest, MaxTokensCutsAReplyAnywhereInAStep) {
  ScriptedEngine scripted(FourTokens());
  for (int64_t max_tokens = 1; max_tokens <= 24; ++max_tokens) {
    SamplingParams sampling;
    sampling.max_tokens = max_tokens;
    const std::vector<int32_t> prompt = PromptOf(11, 3);
    const std::vector<Sequence> ended = scripted.Run({prompt}, sampling);
    EXPECT_EQ(ended[0].tokens, scripted.Expected(prompt, max_tokens));
    EXPECT_EQ(ended[0].num_output_tokens(), max_tokens);
    EXPECT_EQ(ended[0].num_draws, static_cast<uint64_t>(max_tokens));
    EXPECT_EQ(ended[0].finish, FinishReason::kLength);
  }
}

TEST(EngineDraftTest, TheEndTokenCutsAReplyAnywhereInAStep) {
  model::ScriptedOptions options = FourTokens();
  options.end_probability = 0.15;
  ScriptedEngine scripted(options);
  int num_drafted_ends = 0;
  for (int32_t first = 0; first < 64; ++first) {
    SamplingParams sampling;
    sampling.wants_logits_digests = true;
    sampling.max_tokens = 300;
    const std::vector<int32_t> prompt = PromptOf(static_cast<size_t>(5 + first), first);
    const std::vector<Sequence> ended = scripted.Run({prompt}, sampling);
    EXPECT_EQ(ended[0].tokens, scripted.Expected(prompt, 300));
    EXPECT_EQ(ended[0].finish, FinishReason::kStop);
    EXPECT_EQ(ended[0].num_draws, static_cast<uint64_t>(ended[0].num_output_tokens()));
    ASSERT_EQ(ended[0].logits_crc32c.size(), static_cast<size_t>(ended[0].num_output_tokens()));
    num_drafted_ends += ended[0].logits_crc32c.back() == 0 ? 1 : 0;
  }
  EXPECT_GT(num_drafted_ends, 5);
  EXPECT_LT(num_drafted_ends, 60);
}

TEST(EngineDraftTest, TheLimitOfPositionsCutsAReply) {
  ScriptedEngine scripted(FourTokens());
  for (size_t size = 380; size < 400; ++size) {
    SamplingParams sampling;
    sampling.max_tokens = 300;
    const std::vector<Sequence> ended = scripted.Run({PromptOf(size, 1)}, sampling);
    EXPECT_EQ(ended[0].tokens, scripted.Expected(PromptOf(size, 1), 300));
    EXPECT_EQ(ended[0].tokens.size(), 400u);
    EXPECT_EQ(ended[0].finish, FinishReason::kLength);
  }
}

TEST(EngineDraftTest, BatchAndBudgetChangeNothingButTheNumberOfSteps) {
  std::vector<std::vector<int32_t>> prompts;
  for (int32_t i = 0; i < 8; ++i) {
    prompts.push_back(PromptOf(static_cast<size_t>(1 + 41 * i), i));
  }
  SamplingParams sampling;
  sampling.max_tokens = 100;
  sampling.temperature = 1.0f;
  ScriptedEngine wide(FourTokens());
  ScriptedEngine narrow(FourTokens(), {.chunk_tokens = 16, .max_batch_tokens = 24});
  const std::vector<Sequence> a = wide.Run(prompts, sampling);
  const std::vector<Sequence> b = narrow.Run(prompts, sampling);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(a[i].tokens, wide.Expected(prompts[i], 100)) << i;
    EXPECT_EQ(b[i].tokens, a[i].tokens) << i;
  }
  EXPECT_LT(wide.num_steps, 100);
  EXPECT_GT(narrow.num_steps, wide.num_steps);
}

// Tokens, digests and log probabilities of a reply with a stop token are those of the same reply
// without it, up to that token: at every position of every step.
TEST(EngineDraftTest, AStopTokenCutsAReplyAnywhereInAStep) {
  ScriptedEngine scripted(FourTokens());
  SamplingParams sampling;
  sampling.max_tokens = 60;
  const std::vector<int32_t> prompt = PromptOf(11, 3);
  const std::vector<int32_t> whole = scripted.Expected(prompt, 60);
  for (size_t place = 0; place < 60; ++place) {
    const auto stop = static_cast<size_t>(
        std::find(whole.begin() + 11, whole.end(), whole[11 + place]) - whole.begin());
    sampling.stop_token_ids = {whole[11 + place]};
    for (const int64_t max_tokens : {int64_t{60}, static_cast<int64_t>(stop) - 10}) {
      sampling.max_tokens = max_tokens;
      sampling.wants_logits_digests = true;
      const std::vector<Sequence> ended = scripted.Run({prompt}, sampling);
      ASSERT_EQ(ended[0].tokens, std::vector<int32_t>(whole.begin(), whole.begin() + stop + 1));
      ASSERT_EQ(ended[0].finish, FinishReason::kStop);
      ASSERT_EQ(ended[0].logits_crc32c.size(), stop - 10);
      ASSERT_EQ(ended[0].num_draws, stop - 10);
    }
  }
}

TEST(EngineDraftTest, WhoseLogitsAreChangedGainsOneTokenInAStep) {
  ScriptedEngine plain(FourTokens());
  ScriptedEngine biased(FourTokens());
  SamplingParams sampling;
  sampling.max_tokens = 40;
  const std::vector<int32_t> prompt = PromptOf(11, 3);
  const std::vector<Sequence> a = plain.Run({prompt}, sampling);
  sampling.logit_bias = {{5, 1.0f}};
  const std::vector<Sequence> b = biased.Run({prompt}, sampling);
  EXPECT_EQ(a[0].tokens, b[0].tokens);
  EXPECT_LT(plain.num_steps, 30);
  EXPECT_EQ(biased.num_steps, 40);
}

TEST(EngineDraftTest, ALostPageFailsTheStepAndAdvancesNothing) {
  ScriptedEngine scripted(FourTokens());
  SamplingParams sampling;
  sampling.max_tokens = 50;
  Sequence s = *scripted.engine.Admit("r", PromptOf(200, 1), sampling);
  Sequence* const one = &s;
  ASSERT_TRUE(scripted.engine.Step({&one, 1}).ok());
  const std::vector<int32_t> tokens = s.tokens;
  kv::PagePool& pages = scripted.pool->pages(kernels::kCsaKv);
  std::memset(pages.address(s.cache.pages(kernels::kCsaKv)[1]), 0, 64);
  EXPECT_EQ(scripted.engine.Step({&one, 1}).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(s.tokens, tokens);
  EXPECT_EQ(s.cache.num_tokens(), 200);
  EXPECT_EQ(s.num_draws, 1u);
}

// A vocabulary that is worth a thread per row; a row's logits follow from its token.
class WideForward : public CountingForward {
 public:
  static constexpr int64_t kWideVocab = 20000;
  absl::Status Run(const model::ForwardBatch& batch, const kernels::Exec&) override {
    for (size_t r = 0; r < batch.logit_rows.size(); ++r) {
      float* row = batch.logits.f32(static_cast<int64_t>(r));
      const auto token =
          static_cast<uint64_t>(batch.tokens[static_cast<size_t>(batch.logit_rows[r])]);
      for (uint64_t id = 0; id < kWideVocab; ++id) {
        row[id] = static_cast<float>((id * 2654435761u + token * 40503u) % 4096) * 0x1p-9f;
      }
    }
    return absl::OkStatus();
  }
  int64_t vocab_size() const override { return kWideVocab; }
};

std::vector<Sequence> DrawnWith(int threads) {
  WideForward forward;
  auto pool = *kv::CachePool::Create(forward.layout(), 8192, 12);
  ThreadPool thread_pool(threads);
  Engine engine(&forward, pool.get(), {}, {.threads = &thread_pool});
  const SamplingParams asked[] = {
      {},
      {.temperature = 1.0f, .top_p = 0.9f, .seed = 5, .top_logprobs = 3},
      {.temperature = 0.7f, .top_k = 50, .seed = 6, .further_seeds = {8, 9}},
      {.temperature = 1.0f, .seed = 7, .repetition_penalty = 1.4f, .frequency_penalty = 0.5f},
      {.min_p = 0.1f, .top_logprobs = 1, .top_prompt_logprobs = 2, .wants_logits_digests = true}};
  std::vector<Sequence> sequences;
  for (int32_t i = 0; i < 10; ++i) {
    SamplingParams sampling = asked[i % 5];
    sampling.max_tokens = 6;
    sequences.push_back(*engine.Admit("r", PromptOf(static_cast<size_t>(3 + i), i), sampling));
  }
  std::vector<Sequence*> running;
  for (Sequence& sequence : sequences) running.push_back(&sequence);
  while (!running.empty()) {
    EXPECT_TRUE(engine.Step(running).ok());
    std::erase_if(running, [](const Sequence* sequence) { return sequence->is_finished(); });
  }
  for (Sequence& sequence : sequences) sequence.cache = {};
  return sequences;
}

TEST(EngineThreadsTest, ChangeNothingOfWhatIsDrawn) {
  const std::vector<Sequence> alone = DrawnWith(1);
  for (const int threads : {2, 4}) {
    const std::vector<Sequence> together = DrawnWith(threads);
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_EQ(together[i].tokens, alone[i].tokens) << i;
      EXPECT_EQ(together[i].logprobs, alone[i].logprobs) << i;
      EXPECT_EQ(together[i].prompt_logprobs, alone[i].prompt_logprobs) << i;
      EXPECT_EQ(together[i].logits_crc32c, alone[i].logits_crc32c) << i;
      ASSERT_EQ(together[i].further_first.size(), alone[i].further_first.size());
      for (size_t k = 0; k < alone[i].further_first.size(); ++k) {
        EXPECT_EQ(together[i].further_first[k].id, alone[i].further_first[k].id);
      }
    }
  }
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
                    BadInput{"stop token", {1}, {.stop_token_ids = {16}}, "stop_token_ids"},
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
