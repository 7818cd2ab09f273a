// SPDX-License-Identifier: Apache-2.0
// What ends a reply at every position of a step, what changes a draw, what is told about it, and
// every parameter that is refused.
#include "services/engine/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <ostream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/core/workspace.h"
#include "kernels/patches.h"
#include "services/base/request_limits.h"
#include "services/base/thread_pool.h"

namespace isthmus::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kVocab = 16;
constexpr int32_t kEnd = 1;
constexpr SamplerModel kModel = {.vocab_size = kVocab, .max_positions = 600, .end_token_id = kEnd};

Sequence SequenceOf(const SamplingParams& sampling, int64_t num_output = 0) {
  Sequence sequence;
  sequence.tokens = {2, 3};
  sequence.num_prompt_tokens = 2;
  sequence.tokens.resize(static_cast<size_t>(2 + num_output), 4);
  sequence.num_draws = static_cast<uint64_t>(num_output);
  sequence.sampling = sampling;
  return sequence;
}

// Logits in descending order of `ids`; all others are equal and lower.
std::vector<float> Ranked(const std::vector<int32_t>& ids) {
  std::vector<float> logits(kVocab, -3.0f);
  for (size_t i = 0; i < ids.size(); ++i) {
    logits[static_cast<size_t>(ids[i])] = 2.0f - 0.25f * static_cast<float>(i);
  }
  return logits;
}

Gain Draw(Sequence& sequence, const std::vector<int32_t>& drafted,
          const std::vector<float>& logits) {
  const absl::StatusOr<Gain> gain = DrawTokens(
      sequence, drafted, kernels::F32Vector(logits.data(), kVocab), kModel, kernels::Exec{});
  EXPECT_TRUE(gain.ok()) << gain.status();
  return gain.value_or(Gain());
}

Gain Draw(Sequence&& sequence, const std::vector<int32_t>& drafted,
          const std::vector<float>& logits) {
  return Draw(sequence, drafted, logits);
}

std::vector<int32_t> Ids(const std::vector<DrawnToken>& tokens) {
  std::vector<int32_t> ids;
  for (const DrawnToken& token : tokens) ids.push_back(token.id);
  return ids;
}

// A step of up to eight tokens, whose last one is drawn and whose others were drafted; every place
// for the stop, every limit around it. The model is the loop that looks at one token after another.
TEST(DrawTokensTest, AStepEndsAtTheFirstTokenThatEndsTheReply) {
  constexpr int32_t kStop = 9;
  for (const int32_t stop : {kEnd, kStop}) {
    for (size_t size = 1; size <= 8; ++size) {
      for (size_t place = 0; place <= size; ++place) {  // `size`: nowhere.
        for (int64_t max_tokens = 4; max_tokens <= 13; ++max_tokens) {
          for (const int64_t min_tokens : {0, 4, 7}) {
            if (min_tokens > max_tokens) continue;
            std::vector<int32_t> step(size, 5);
            if (place < size) step[place] = stop;
            std::vector<int32_t> expected;
            FinishReason finish = FinishReason::kNone;
            for (const int32_t token : step) {
              expected.push_back(token);
              const auto length = static_cast<int64_t>(3 + expected.size());
              if (token == stop && length >= min_tokens) finish = FinishReason::kStop;
              if (finish == FinishReason::kNone && length >= max_tokens) {
                finish = FinishReason::kLength;
              }
              if (finish != FinishReason::kNone) break;
            }
            Sequence sequence = SequenceOf(
                {.max_tokens = max_tokens, .min_tokens = min_tokens, .stop_token_ids = {8, kStop}},
                3);
            // The drawn token must be one that may be drawn at all.
            const bool draws_masked =
                place + 1 == size && static_cast<int64_t>(3 + size) < min_tokens;
            if (draws_masked) continue;
            const std::vector<float> logits = Ranked({step.back()});
            step.pop_back();
            const Gain gain = Draw(sequence, step, logits);
            ASSERT_EQ(Ids(gain.tokens), expected)
                << size << " tokens, stop at " << place << ", max_tokens " << max_tokens;
            ASSERT_EQ(gain.finish, finish)
                << size << " tokens, stop at " << place << ", max_tokens " << max_tokens;
          }
        }
      }
    }
  }
}

TEST(DrawTokensTest, NothingBehindTheStopIsTold) {
  Sequence sequence = SequenceOf({.max_tokens = 50, .wants_logits_digests = true}, 1);
  Append(Draw(sequence, {5, kEnd, 6}, Ranked({7})), sequence);
  EXPECT_THAT(sequence.tokens, ElementsAre(2, 3, 4, 5, kEnd));
  EXPECT_EQ(sequence.logits_crc32c.size(), 2u);
  EXPECT_EQ(sequence.num_draws, 3u);
  EXPECT_EQ(sequence.finish, FinishReason::kStop);
}

TEST(DrawTokensTest, TheEndTokenMayBeIgnored) {
  Sequence ignoring = SequenceOf({.max_tokens = 50, .ignores_end_token = true}, 1);
  const Gain gain = Draw(ignoring, {kEnd, 5}, Ranked({kEnd}));
  EXPECT_EQ(Ids(gain.tokens), (std::vector<int32_t>{kEnd, 5, kEnd}));
  EXPECT_EQ(gain.finish, FinishReason::kNone);
  // Whoever names it as a stop token wants it to stop.
  Sequence naming =
      SequenceOf({.max_tokens = 50, .stop_token_ids = {kEnd}, .ignores_end_token = true}, 1);
  EXPECT_EQ(Draw(naming, {}, Ranked({kEnd})).finish, FinishReason::kStop);
}

TEST(DrawTokensTest, NeitherEndNorStopTokensAreDrawnBeforeMinTokens) {
  const SamplingParams sampling = {.max_tokens = 9, .min_tokens = 3, .stop_token_ids = {9}};
  const std::vector<float> logits = Ranked({kEnd, 9, 5});
  EXPECT_THAT(Ids(Draw(SequenceOf(sampling, 0), {}, logits).tokens), ElementsAre(5));
  EXPECT_THAT(Ids(Draw(SequenceOf(sampling, 1), {}, logits).tokens), ElementsAre(5));
  const Gain third = Draw(SequenceOf(sampling, 2), {}, logits);
  EXPECT_THAT(Ids(third.tokens), ElementsAre(kEnd));
  EXPECT_EQ(third.finish, FinishReason::kStop);
}

TEST(DrawTokensTest, TheLimitOfPositionsEndsAReply) {
  SamplerModel small = kModel;
  small.max_positions = 5;
  EXPECT_EQ(FinishWith(SequenceOf({.max_tokens = 50}), 5, 1, small), FinishReason::kNone);
  EXPECT_EQ(FinishWith(SequenceOf({.max_tokens = 50}), 5, 2, small), FinishReason::kLength);
}

TEST(DrawTokensTest, PenaltiesBiasesAndBansChangeWhatIsDrawn) {
  const std::vector<float> logits = Ranked({2, 4, 7, 9});  // 2, 1.75, 1.5, 1.25
  const auto drawn = [&](SamplingParams sampling) {
    sampling.max_tokens = 50;
    return Draw(SequenceOf(sampling, 2), {}, logits).tokens.back().id;  // Known: 2, 3; 4, 4.
  };
  EXPECT_EQ(drawn({}), 2);
  EXPECT_EQ(drawn({.repetition_penalty = 1.1f}), 2);
  EXPECT_EQ(drawn({.repetition_penalty = 1.5f}), 7);
  EXPECT_EQ(drawn({.presence_penalty = -1.0f}), 4);
  EXPECT_EQ(drawn({.frequency_penalty = -0.2f}), 4);  // Twice.
  EXPECT_EQ(drawn({.logit_bias = {{9, 1.0f}}}), 9);
  EXPECT_EQ(drawn({.logit_bias = {{7, 0.5f}}}), 2);  // Equal to the first: the smaller id.
  EXPECT_EQ(drawn({.banned_token_ids = {2, 4}}), 7);
}

// Of every length of the reply, drawn by a sequence that goes on and by one that begins there, as
// after a handoff, a fork or an image.
TEST(DrawTokensTest, PenaltiesCountTokensAsTheyComeAndAnew) {
  SamplingParams sampling = {.temperature = 1.0f,
                             .seed = 9,
                             .repetition_penalty = 1.7f,
                             .frequency_penalty = 0.4f,
                             .presence_penalty = -0.3f,
                             .max_tokens = 300,
                             .ignores_end_token = true};
  Sequence whole = SequenceOf(sampling);
  for (int i = 0; i < 200; ++i) {
    std::vector<float> logits(kVocab);
    for (size_t id = 0; id < logits.size(); ++id) {
      logits[id] = 0.25f * static_cast<float>((id * 7 + static_cast<size_t>(i) * 5) % 16) - 1.5f;
    }
    Sequence anew = SequenceOf(sampling);
    anew.tokens = whole.tokens;
    anew.num_draws = whole.num_draws;
    // The same by hand: edited logits, drawn without penalties.
    Sequence plain = SequenceOf({.temperature = 1.0f, .seed = 9, .max_tokens = 300});
    plain.tokens = whole.tokens;
    plain.num_draws = whole.num_draws;
    std::vector<float> edited = logits;
    for (int32_t id = 0; id < kVocab; ++id) {
      const auto& tokens = whole.tokens;
      if (std::ranges::count(tokens, id) == 0) continue;
      const auto in_output = std::count(tokens.begin() + 2, tokens.end(), id);
      double logit = logits[static_cast<size_t>(id)];
      logit = logit > 0.0 ? logit / 1.7f : logit * 1.7f;
      if (in_output > 0) logit -= double{0.4f} * static_cast<double>(in_output) + double{-0.3f};
      edited[static_cast<size_t>(id)] = static_cast<float>(logit);
    }
    const int32_t expected = Draw(plain, {}, edited).tokens[0].id;
    ASSERT_EQ(Draw(anew, {}, logits).tokens[0].id, expected) << i;
    Gain gain = Draw(whole, {}, logits);
    ASSERT_EQ(gain.tokens[0].id, expected) << i;
    Append(std::move(gain), whole);
  }
  EXPECT_EQ(whole.counts.num_counted, 201);
  EXPECT_GT(whole.counts.mentions.size(), 8u);
}

TEST(DrawTokensTest, CountsNothingUnlessAPenaltyAsks) {
  Sequence sequence = SequenceOf({.logit_bias = {{7, 1.0f}}, .max_tokens = 50}, 3);
  Draw(sequence, {}, Ranked({2}));
  EXPECT_EQ(sequence.counts.num_counted, 0);
  EXPECT_EQ(sequence.counts.mentions.capacity(), 0u);
}

TEST(DrawTokensTest, TakeNoMoreScratchThanIsPlanned) {
  constexpr int64_t kMany = 5000;
  std::vector<float> logits(kMany);
  for (int64_t id = 0; id < kMany; ++id) logits[id] = 0.001f * static_cast<float>(id * 37 % kMany);
  SamplingParams sampling = {.temperature = 1.0f, .repetition_penalty = 1.3f, .max_tokens = 50};
  for (int32_t id = 0; id < kMaxLogitBiases; ++id) sampling.logit_bias.push_back({id, 0.5f});
  SamplerModel large = kModel;
  large.vocab_size = kMany;
  Sequence sequence = SequenceOf(sampling, 200);
  // The trusted path takes the most.
  const PatchSet patches = *kernels::ResolvePatches(kernels::NoPatches(), false);
  kernels::Workspace workspace;
  ASSERT_TRUE(DrawTokens(sequence, {}, kernels::F32Vector(logits.data(), kMany), large,
                         kernels::Exec{.patches = &patches, .workspace = &workspace})
                  .ok());
  EXPECT_EQ(workspace.peak_bytes(), DrawScratchBytes(kMany, 1));
}

TEST(DrawTokensTest, LogprobsAndDigestsAreOfTheModelsOwnLogits) {
  const std::vector<float> logits = Ranked({2, 4, 7});
  const Gain plain = Draw(
      SequenceOf({.max_tokens = 9, .top_logprobs = 2, .wants_logits_digests = true}), {}, logits);
  const Gain banned = Draw(SequenceOf({.banned_token_ids = {2},
                                       .max_tokens = 9,
                                       .top_logprobs = 2,
                                       .wants_logits_digests = true}),
                           {}, logits);
  EXPECT_EQ(plain.tokens[0].logprobs.rank, 1);
  EXPECT_EQ(banned.tokens[0].logprobs.chosen.id, 4);
  EXPECT_EQ(banned.tokens[0].logprobs.rank, 2);
  EXPECT_EQ(banned.tokens[0].logprobs.top, plain.tokens[0].logprobs.top);
  EXPECT_EQ(banned.tokens[0].logits_crc32c, plain.tokens[0].logits_crc32c);
}

TEST(DrawTokensTest, FurtherFirstTokensAreThoseThatTheirSeedsGiveAlone) {
  const std::vector<float> logits(kVocab, 0.0f);
  SamplingParams sampling = {.temperature = 1.0f, .seed = 5, .max_tokens = 9, .top_logprobs = 0};
  sampling.further_seeds = {6, 7, 8};
  Sequence sequence = SequenceOf(sampling);
  Append(Draw(sequence, {}, logits), sequence);
  ASSERT_EQ(sequence.further_first.size(), 3u);
  std::vector<int32_t> alone;
  for (uint64_t seed = 5; seed <= 8; ++seed) {
    sampling.seed = seed;
    sampling.further_seeds.clear();
    alone.push_back(Draw(SequenceOf(sampling), {}, logits).tokens[0].id);
  }
  EXPECT_EQ(sequence.tokens.back(), alone[0]);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(sequence.further_first[i].id, alone[i + 1]);
    EXPECT_EQ(sequence.further_first[i].logprobs.chosen.id, alone[i + 1]);
  }
  EXPECT_THAT(Draw(sequence, {}, logits).further, IsEmpty());  // Only with the first token.
}

// Enough logits for every thread, though there are none.
constexpr int64_t kWide = int64_t{1} << 18;

TEST(ForEachRowTest, LooksAtEachRowOnceInScratchOfItsOwn) {
  for (const int threads : {1, 2, 5}) {
    ThreadPool pool(threads);
    kernels::Workspace workspace;
    std::vector<std::atomic<int>> looks(40);
    const auto look = [&](int64_t row, const kernels::Exec& exec) {
      EXPECT_EQ(kernels::NumThreads(exec), 1);
      kernels::Workspace::Scope scope(exec.workspace);
      auto* scratch = scope.Take<int64_t>(512);
      std::fill_n(scratch, 512, row);
      for (int again = 0; again < 50; ++again) {
        EXPECT_EQ(std::count(scratch, scratch + 512, row), 512);
      }
      ++looks[static_cast<size_t>(row)];
      return absl::OkStatus();
    };
    const kernels::Exec exec = {.threads = &pool, .workspace = &workspace};
    EXPECT_TRUE(ForEachRow(40, kWide, exec, look).ok());
    EXPECT_TRUE(std::ranges::all_of(looks, [](const auto& count) { return count == 1; }));
    EXPECT_EQ(workspace.peak_bytes(), DrawScratchBytes(kWide, threads));
    EXPECT_TRUE(ForEachRow(0, kWide, exec, look).ok());
  }
}

TEST(ForEachRowTest, TellsTheErrorOfTheFirstRowWhoeverFailsFirst) {
  for (const int threads : {1, 4}) {
    ThreadPool pool(threads);
    std::atomic<bool> later_failed = false;
    const auto look = [&](int64_t row, const kernels::Exec&) -> absl::Status {
      if (row > 20) later_failed = true;
      // With threads of its own row 7 fails last.
      while (row == 7 && threads > 1 && !later_failed) std::this_thread::yield();
      return row == 7 || row > 20 ? absl::InternalError(absl::StrCat("row ", row))
                                  : absl::OkStatus();
    };
    const absl::Status status = ForEachRow(40, kWide, {.threads = &pool}, look);
    EXPECT_EQ(status.message(), "row 7");
  }
}

TEST(ForEachRowTest, BoundsTheScratchOfManyThreads) {
  EXPECT_EQ(DrawScratchBytes(kWide, 16), 16 * DrawScratchBytes(kWide, 1));
  EXPECT_EQ(DrawScratchBytes(kWide, 256), DrawScratchBytes(kWide, 16));
}

TEST(TakesDraftsTest, OnlyWhereADraftIsWhatWouldBeDrawn) {
  const auto takes = [](SamplingParams sampling) {
    sampling.max_tokens = 50;
    return TakesDrafts(SequenceOf(sampling, 3));
  };
  EXPECT_TRUE(takes({}));
  EXPECT_TRUE(takes({.temperature = 1.0f, .top_p = 0.5f, .stop_token_ids = {5}}));
  EXPECT_TRUE(takes({.min_tokens = 4}));
  EXPECT_FALSE(takes({.min_tokens = 5}));
  EXPECT_FALSE(takes({.repetition_penalty = 1.1f}));
  EXPECT_FALSE(takes({.frequency_penalty = 0.1f}));
  EXPECT_FALSE(takes({.presence_penalty = 0.1f}));
  EXPECT_FALSE(takes({.logit_bias = {{1, 0.0f}}}));
  EXPECT_FALSE(takes({.banned_token_ids = {1}}));
  EXPECT_FALSE(takes({.top_logprobs = 0}));
}

// ---- Every parameter that is refused.

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<int32_t> Many(size_t count) {
  std::vector<int32_t> ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = static_cast<int32_t>(i);
  return ids;
}

TEST(ValidateSamplingParamsTest, NamesTheFieldItsValueAndWhatIsAllowed) {
  struct Bad {
    SamplingParams sampling;
    std::vector<const char*> named;
  };
  std::vector<kernels::LogitBias> many_biases(1025);
  for (size_t i = 0; i < many_biases.size(); ++i) many_biases[i].id = static_cast<int32_t>(i);
  for (const Bad& bad : std::vector<Bad>{
           {{.temperature = kNan}, {"temperature", "nan"}},
           {{.temperature = kInfinity}, {"temperature", "inf"}},
           {{.temperature = -1.0f}, {"temperature", "-1"}},
           {{.top_p = kNan}, {"top_p", "nan"}},
           {{.top_p = 0.0f}, {"top_p", "0"}},
           {{.top_p = 1.5f}, {"top_p", "1.5"}},
           {{.top_k = -1}, {"top_k", "-1"}},
           {{.min_p = kNan}, {"min_p", "nan"}},
           {{.min_p = -0.1f}, {"min_p", "-0.1"}},
           {{.min_p = 1.1f}, {"min_p", "1.1"}},
           {{.further_seeds = std::vector<uint64_t>(16)}, {"num_replies: is 17", "1 to 16"}},
           {{.repetition_penalty = kNan}, {"repetition_penalty: is nan", "above 0, at most 2"}},
           {{.repetition_penalty = 0.0f}, {"repetition_penalty: is 0", "above 0"}},
           {{.repetition_penalty = -1.0f}, {"repetition_penalty: is -1"}},
           {{.repetition_penalty = 2.5f}, {"repetition_penalty: is 2.5"}},
           {{.frequency_penalty = kNan}, {"frequency_penalty: is nan", "-2 to 2"}},
           {{.frequency_penalty = -2.5f}, {"frequency_penalty: is -2.5"}},
           {{.frequency_penalty = kInfinity}, {"frequency_penalty: is inf"}},
           {{.presence_penalty = kNan}, {"presence_penalty: is nan", "-2 to 2"}},
           {{.presence_penalty = 3.0f}, {"presence_penalty: is 3"}},
           {{.logit_bias = {{3, kNan}}}, {"logit_bias[3]: is nan", "-100 to 100"}},
           {{.logit_bias = {{3, -101.0f}}}, {"logit_bias[3]: is -101"}},
           {{.logit_bias = {{16, 1.0f}}}, {"logit_bias: has token 16", "want 0 to 15"}},
           {{.logit_bias = {{-1, 1.0f}}}, {"logit_bias: has token -1"}},
           {{.logit_bias = {{3, 1.0f}, {3, 1.0f}}}, {"logit_bias: has token 3 twice"}},
           {{.logit_bias = many_biases}, {"logit_bias: has 1025 entries", "1024"}},
           {{.banned_token_ids = {4, 5, 4}}, {"banned_token_ids: has token 4 twice"}},
           {{.banned_token_ids = {99}}, {"banned_token_ids: has token 99"}},
           {{.banned_token_ids = Many(1025)}, {"banned_token_ids: has 1025 entries", "1024"}},
           {{.banned_token_ids = Many(16)}, {"banned_token_ids: leaves no token of the 16"}},
           {{.logit_bias = {{4, 1.0f}}, .banned_token_ids = {4}},
            {"banned_token_ids: has token 4, which logit_bias has as well"}},
           {{.max_tokens = 0}, {"max_tokens: is 0", "at least 1"}},
           {{.max_tokens = -5}, {"max_tokens: is -5"}},
           {{.max_tokens = 3, .min_tokens = 4}, {"min_tokens: is 4", "max_tokens, which is 3"}},
           {{.min_tokens = -1}, {"min_tokens: is -1"}},
           {{.banned_token_ids = {0, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14},
           .min_tokens = 2,
           .stop_token_ids = {15}},
            {"banned_token_ids: leaves no token"}},
           {{.stop_token_ids = {16}}, {"stop_token_ids: has token 16", "want 0 to 15"}},
           {{.stop_token_ids = {-7}}, {"stop_token_ids: has token -7"}},
           {{.stop_token_ids = {3, 3}}, {"stop_token_ids: has token 3 twice"}},
           {{.stop_token_ids = Many(65)}, {"stop_token_ids: has 65 entries", "64"}},
           {{.top_logprobs = 21}, {"top_logprobs: is 21", "0 to 20"}},
           {{.top_logprobs = -1}, {"top_logprobs: is -1"}},
           {{.top_prompt_logprobs = 21}, {"top_prompt_logprobs: is 21", "0 to 20"}},
           {{.top_prompt_logprobs = -2}, {"top_prompt_logprobs: is -2"}}}) {
    const absl::Status status = ValidateSamplingParams(bad.sampling, kModel);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.named[0];
    for (const char* named : bad.named) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(named));
    }
  }
}

TEST(ValidateSamplingParamsTest, TakesTheLimitsThemselves) {
  SamplerModel large = kModel;
  large.vocab_size = 2000;
  std::vector<kernels::LogitBias> biases(1024);
  for (size_t i = 0; i < biases.size(); ++i) {
    biases[i] = {static_cast<int32_t>(900 + i), i % 2 == 0 ? 100.0f : -100.0f};
  }
  const SamplingParams sampling = {.temperature = 2.0f,
                                   .top_p = 1.0f,
                                   .top_k = std::numeric_limits<int32_t>::max(),
                                   .min_p = 1.0f,
                                   .further_seeds = std::vector<uint64_t>(15),
                                   .repetition_penalty = 2.0f,
                                   .frequency_penalty = -2.0f,
                                   .presence_penalty = 2.0f,
                                   .logit_bias = biases,
                                   .banned_token_ids = Many(900),
                                   .max_tokens = 1,
                                   .min_tokens = 1,
                                   .stop_token_ids = Many(64),
                                   .top_logprobs = 20,
                                   .top_prompt_logprobs = 0};
  const absl::Status status = ValidateSamplingParams(sampling, large);
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace isthmus::engine
