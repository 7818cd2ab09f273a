// SPDX-License-Identifier: Apache-2.0
// What a forward pass refuses, and that its bits do not depend on how tokens are cut into steps or
// on the neighbours: short prompts, so that sanitizers can afford it. tests/fidelity compares long
// ones and the golden files.
#include "services/model/forward.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "kernels/core/workspace.h"
#include "services/model/tap.h"
#include "services/model/testing/page_store.h"

namespace isthmus::model {
namespace {

using kernels::Arithmetic;

constexpr int kPageTokens = 128;
constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";

const Weights& BundledWeights() {
  static const std::unique_ptr<Weights> weights = *Weights::Load(kCheckpoint, {});
  return *weights;
}

class ForwardTest : public testing::TestWithParam<Arithmetic> {
 protected:
  ForwardTest() : forward_(*ModelForward::Create(&BundledWeights(), GetParam(), kPageTokens)) {}

  // Logits of the last token of `tokens`, fed in steps of the given sizes (the last repeats).
  std::vector<float> LastLogits(const std::vector<int32_t>& tokens, std::vector<int64_t> steps) {
    PageStore store(forward_->layout(), static_cast<int64_t>(tokens.size()));
    std::vector<float> logits(static_cast<size_t>(forward_->vocab_size()));
    int64_t at = 0;
    for (size_t i = 0; at < static_cast<int64_t>(tokens.size()); ++i) {
      const int64_t wanted = steps[std::min(i, steps.size() - 1)];
      const int64_t size = std::min(wanted, static_cast<int64_t>(tokens.size()) - at);
      const kernels::SequenceKv view = store.View(0, at, size);
      const int64_t row = size - 1;
      const absl::Status status = forward_->Run(
          {.tokens = std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(size)),
           .sequences = {&view, 1},
           .logit_rows = {&row, 1},
           .logits = kernels::F32Matrix(logits.data(), 1, forward_->vocab_size())},
          exec_);
      EXPECT_TRUE(status.ok()) << status;
      at += size;
    }
    return logits;
  }

  static std::vector<int32_t> Tokens(int64_t count, int32_t seed = 1) {
    std::vector<int32_t> tokens;
    for (int64_t t = 0; t < count; ++t) {
      tokens.push_back(static_cast<int32_t>((t * 977 + seed * 131) % 1900) + 9);
    }
    return tokens;
  }

  static bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), 4 * a.size()) == 0;
  }

  const std::unique_ptr<ModelForward> forward_;
  kernels::Exec exec_;
};

TEST_P(ForwardTest, AnyCutIntoStepsGivesTheSameBits) {
  const std::vector<int32_t> tokens = Tokens(134);
  const std::vector<float> whole = LastLogits(tokens, {134});
  EXPECT_TRUE(SameBits(whole, LastLogits(tokens, {5})));
  EXPECT_TRUE(SameBits(whole, LastLogits(tokens, {127, 3})));
  for (int64_t prefill : {128, 129, 130, 131}) {
    EXPECT_TRUE(SameBits(whole, LastLogits(tokens, {prefill, 1}))) << prefill;
  }
  EXPECT_FALSE(SameBits(whole, LastLogits(Tokens(134, 2), {134})));
}

TEST_P(ForwardTest, NeighboursInABatchChangeNothing) {
  const std::vector<int32_t> mine = Tokens(21);
  const std::vector<int32_t> other = Tokens(9, 7);
  std::vector<int32_t> tokens = other;
  tokens.insert(tokens.end(), mine.begin(), mine.end());
  PageStore first(forward_->layout(), 9);
  PageStore second(forward_->layout(), 21);
  const kernels::SequenceKv views[] = {first.View(0, 0, 9), second.View(9, 0, 21)};
  const int64_t row = 29;
  std::vector<float> logits(static_cast<size_t>(forward_->vocab_size()));
  ASSERT_TRUE(forward_
                  ->Run({.tokens = tokens,
                         .sequences = views,
                         .logit_rows = {&row, 1},
                         .logits = kernels::F32Matrix(logits.data(), 1, forward_->vocab_size())},
                        exec_)
                  .ok());
  EXPECT_TRUE(SameBits(logits, LastLogits(mine, {21})));
}

TEST_P(ForwardTest, ATapSeesTheIndexQueryOfEveryRow) {
  const std::vector<int32_t> tokens = Tokens(3);  // Too few for an entry of any layer.
  PageStore store(forward_->layout(), 3);
  const kernels::SequenceKv view = store.View(0, 0, 3);
  int num_queries = 0;
  int num_weights = 0;
  Tap tap;
  tap.on_tensor = [&](const TapTensor& tensor) {
    EXPECT_NE(tensor.name, "index_scores");
    EXPECT_NE(tensor.name, "topk");
    if (tensor.name == "index_q") ++num_queries;
    if (tensor.name == "index_weights") ++num_weights;
    if (tensor.name.substr(0, 5) == "index") {
      EXPECT_EQ(tensor.shape[0], 3) << tensor.name;
    }
  };
  ASSERT_TRUE(forward_
                  ->Run({.tokens = tokens,
                         .sequences = {&view, 1},
                         .logit_rows = {},
                         .logits = {},
                         .tap = &tap},
                        exec_)
                  .ok());
  int num_indexers = 0;
  for (int layer = 0; layer < BundledWeights().config().num_hidden_layers; ++layer) {
    if (BundledWeights().layer(layer).ratio == 4) ++num_indexers;
  }
  EXPECT_GT(num_indexers, 0);
  EXPECT_EQ(num_queries, num_indexers);
  EXPECT_EQ(num_weights, num_indexers);
}

TEST_P(ForwardTest, RefusesWhatItCannotRunWithBothValues) {
  PageStore store(forward_->layout(), 8);
  std::vector<int32_t> tokens = {9, 10, 11};
  kernels::SequenceKv view = store.View(0, 0, 3);
  const auto run = [&] {
    return forward_->Run(
        {.tokens = tokens, .sequences = {&view, 1}, .logit_rows = {}, .logits = {}}, exec_);
  };
  EXPECT_TRUE(run().ok());
  tokens[1] = 1920;
  EXPECT_NE(run().message().find("id 1920, the vocabulary has 1920"), absl::string_view::npos);
  tokens[1] = -1;
  EXPECT_NE(run().message().find("id -1"), absl::string_view::npos);
  tokens[1] = 10;
  view.num_rows = 2;
  EXPECT_NE(run().message().find("sequences have 2 rows, the batch has 3"),
            absl::string_view::npos);
  view.num_rows = 3;
  view.start_position = 1048574;
  EXPECT_NE(run().message().find("1048577 tokens, the model's limit is 1048576"),
            absl::string_view::npos);
  EXPECT_EQ(forward_->Run({}, exec_).code(), absl::StatusCode::kInvalidArgument);
  const int64_t beyond = 3;
  view = store.View(0, 0, 3);
  float logit = 0.0f;
  EXPECT_FALSE(forward_
                   ->Run({.tokens = tokens,
                          .sequences = {&view, 1},
                          .logit_rows = {&beyond, 1},
                          .logits = kernels::F32Matrix(&logit, 1, 1920)},
                         exec_)
                   .ok());
}

INSTANTIATE_TEST_SUITE_P(Arithmetics, ForwardTest,
                         testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                         [](const auto& param) {
                           return param.param == Arithmetic::kMath ? "math" : "reference";
                         });

}  // namespace
}  // namespace isthmus::model
