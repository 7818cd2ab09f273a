// SPDX-License-Identifier: Apache-2.0
// Goal: tokens that a GPU draws beside its logits (sampling.on_device) are those that the host
// draws. Method: the tiny model on the trusted paths, whose logits have the bits of the CPU's, so
// that tokens can be compared; replies that the device draws for run with others that need the
// host, in steps with graphs and without. Runs in the emulator too, hence the few tokens.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kernels/patches.h"
#include "kernels/sampling/sampling.h"
#include "kernels/testing/device.h"
#include "tests/fidelity/models.h"

namespace isthmus::fidelity {
namespace {

constexpr float kUntouched = -12345.0f;
constexpr int64_t kVocabulary = 512;

EngineChoice ChoiceOf(const std::string& device, bool draws) {
  EngineChoice choice = {.checkpoint = BundledPath("tiny-random-3layer/nvfp4-cast"),
                         .arithmetic = kernels::Arithmetic::kReference,
                         .device = device,
                         .patches = kernels::NoPatches()};
  choice.patches["sampling.on_device"] = draws;
  return choice;
}

std::unique_ptr<diag::LocalEngine> Open(const std::string& device, bool draws) {
  auto local = OpenEngine(ChoiceOf(device, draws));
  EXPECT_TRUE(local.ok()) << local.status();
  return local.ok() ? *std::move(local) : nullptr;
}

// What a request may ask for, drawn by the device and by the host.
std::vector<engine::SamplingParams> EveryKind() {
  using engine::SamplingParams;
  const SamplingParams greedy = {.max_tokens = 4};
  const SamplingParams sampled = {.temperature = 1.0f, .top_p = 0.95f, .seed = 3, .max_tokens = 5};
  SamplingParams narrow = sampled;
  narrow.top_k = 20;
  narrow.min_p = 0.05f;
  narrow.seed = 4;
  SamplingParams penalised = sampled;
  penalised.repetition_penalty = 1.4f;
  penalised.max_tokens = 3;
  SamplingParams told = greedy;
  told.top_logprobs = 2;
  SamplingParams digested = sampled;
  digested.wants_logits_digests = true;
  return {greedy, penalised, sampled, told, narrow, digested};
}

struct Reply {
  std::vector<int32_t> tokens;
  std::vector<uint32_t> digests;
  std::vector<kernels::TokenLogprobs> logprobs;
  bool operator==(const Reply&) const = default;
};

// All kinds together, of which `order` says who stands where in a step.
std::vector<Reply> Replies(diag::LocalEngine& local, const std::vector<size_t>& order) {
  const std::vector<engine::SamplingParams> kinds = EveryKind();
  std::vector<Reply> replies(kinds.size());
  std::vector<engine::Sequence> sequences;
  for (size_t i = 0; i < kinds.size(); ++i) {
    const auto size = static_cast<int64_t>(2 + i / 2);
    auto sequence = local.engine().Admit("r", SeededIds(i, size, kVocabulary), kinds[i]);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    if (!sequence.ok()) return replies;
    sequences.push_back(*std::move(sequence));
  }
  std::vector<engine::Sequence*> running;
  for (const size_t i : order) running.push_back(&sequences[i]);
  while (!running.empty()) {
    const absl::Status status = local.engine().Step(running);
    EXPECT_TRUE(status.ok()) << status;
    if (!status.ok()) return replies;
    std::erase_if(running, [](const engine::Sequence* s) { return s->is_finished(); });
  }
  for (size_t i = 0; i < kinds.size(); ++i) {
    replies[i] = {sequences[i].tokens, sequences[i].logits_crc32c, sequences[i].logprobs};
  }
  return replies;
}

TEST(SamplingOnDeviceTest, RepliesAreThoseThatTheHostDraws) {
  ISTHMUS_REQUIRE_DEVICE();
  const std::vector<size_t> order = {0, 1, 2, 3, 4, 5};
  const std::vector<size_t> other_order = {4, 1, 0, 5, 3, 2};
  const auto on_host = Open("cpu", true);  // Where the patch means nothing.
  const auto off = Open("cuda:0", false);
  const auto on = Open("cuda:0", true);
  ASSERT_TRUE(on_host && off && on);
  const std::vector<Reply> want = Replies(*on_host, order);
  EXPECT_EQ(Replies(*off, order), want);
  EXPECT_EQ(Replies(*on, other_order), want);
}

// One step of four sequences of one token each, straight through the forward pass.
class OneStep {
 public:
  explicit OneStep(diag::LocalEngine& local) : local_(local) {
    for (int64_t i = 0; i < 4; ++i) {
      caches_.push_back(*local.pool().Open());
      EXPECT_TRUE(caches_.back().Reserve(1).ok());
      views_.push_back(caches_.back().View(i, 1));
    }
  }

  absl::Status Run(uint32_t phase, std::span<const std::optional<model::RowDraw>> draws,
                   const model::Tap* tap = nullptr) {
    logits_.assign(4 * kVocabulary, kUntouched);
    drawn_.assign(draws.size(), model::kNotDrawn);
    kernels::Exec exec = local_.exec();
    exec.phase = phase;
    return local_.forward().Run({.tokens = tokens_,
                                 .sequences = views_,
                                 .logit_rows = rows_,
                                 .logits = kernels::F32Matrix(logits_.data(), 4, kVocabulary),
                                 .draws = draws,
                                 .drawn = drawn_,
                                 .tap = tap},
                                exec);
  }

  std::vector<float> Row(size_t r) const {
    const auto begin = logits_.begin() + static_cast<int64_t>(r) * kVocabulary;
    return {begin, begin + kVocabulary};
  }
  const std::vector<int32_t>& drawn() const { return drawn_; }

 private:
  diag::LocalEngine& local_;
  const std::vector<int32_t> tokens_ = {17, 300, 5, 44};
  const std::vector<int64_t> rows_ = {0, 1, 2, 3};
  std::vector<kv::SequenceCache> caches_;
  std::vector<kernels::SequenceKv> views_;
  std::vector<float> logits_;
  std::vector<int32_t> drawn_;
};

int32_t DrawFrom(const std::vector<float>& row, const model::RowDraw& draw) {
  return *kernels::Sample({.logits = kernels::F32Vector(row.data(), kVocabulary),
                           .temperature = draw.temperature,
                           .top_p = draw.top_p,
                           .top_k = draw.top_k,
                           .min_p = draw.min_p,
                           .seed = draw.seed,
                           .counter = draw.counter},
                          kernels::Exec{});
}

using Draws = std::vector<std::optional<model::RowDraw>>;

TEST(SamplingOnDeviceTest, ARowComesBackAsItsTokenOrAsItsLogits) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto off = Open("cuda:0", false);
  const auto on = Open("cuda:0", true);
  ASSERT_TRUE(off && on);
  const model::RowDraw sampled = {.temperature = 1.5f, .top_p = 0.9f, .seed = 8, .counter = 2};
  const Draws mixed = {model::RowDraw{}, std::nullopt, sampled, std::nullopt};
  OneStep plain(*off);
  ASSERT_TRUE(plain.Run(kPhaseDecode, mixed).ok());
  EXPECT_EQ(plain.drawn(), std::vector<int32_t>(4, model::kNotDrawn));

  OneStep step(*on);
  const Draws others = {std::nullopt, sampled, std::nullopt, model::RowDraw{}};
  const Draws none(4, std::nullopt);
  // Of each shape the first step runs as it is, the second is captured, the third replayed; the
  // last has no graph.
  struct Turn {
    uint32_t phase;
    const Draws* draws;
  };
  const Turn turns[] = {{kPhaseDecode, &mixed}, {kPhaseDecode, &others}, {kPhaseDecode, &mixed},
                        {kPhaseDecode, &none},  {kPhaseDecode, &others}, {kPhasePrefill, &mixed}};
  for (const Turn& turn : turns) {
    SCOPED_TRACE(&turn - turns);
    ASSERT_TRUE(step.Run(turn.phase, *turn.draws).ok());
    for (size_t r = 0; r < 4; ++r) {
      const std::optional<model::RowDraw>& draw = (*turn.draws)[r];
      EXPECT_EQ(step.drawn()[r], draw ? DrawFrom(plain.Row(r), *draw) : model::kNotDrawn) << r;
      const std::vector<float> untouched(static_cast<size_t>(kVocabulary), kUntouched);
      EXPECT_EQ(step.Row(r), draw ? untouched : plain.Row(r)) << r;
    }
  }
}

TEST(SamplingOnDeviceTest, ARowWithoutAFiniteLogitIsMinusOne) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto on = Open("cuda:0", true);
  ASSERT_TRUE(on);
  OneStep step(*on);
  // The third sequence's streams before the last layer.
  const int last = on->weights().config().num_hidden_layers - 1;
  const auto width = static_cast<size_t>(4 * on->weights().config().hidden_size);
  std::vector<float> streams(4 * width, 0.5f);
  std::fill_n(streams.begin() + static_cast<int64_t>(2 * width), width,
              std::numeric_limits<float>::quiet_NaN());
  model::Tap tap;
  tap.input_streams = [&](int layer) { return layer == last ? streams.data() : nullptr; };
  const Draws draws(4, model::RowDraw{.temperature = 1.0f});
  ASSERT_TRUE(step.Run(kPhaseDecode, draws, &tap).ok());
  for (size_t r = 0; r < 4; ++r) EXPECT_EQ(step.drawn()[r] == -1, r == 2) << step.drawn()[r];
}

TEST(SamplingOnDeviceTest, RefusesListsOfOtherLengths) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto on = Open("cuda:0", true);
  ASSERT_TRUE(on);
  OneStep step(*on);
  const absl::Status status = step.Run(kPhaseDecode, Draws(3));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "forward: 3 draws and 3 tokens of 4 rows");
}

}  // namespace
}  // namespace isthmus::fidelity
