// SPDX-License-Identifier: Apache-2.0
#include "services/diag/decode_bench.h"

#include <gtest/gtest.h>

#include "services/diag/curve.h"

namespace isthmus::diag {
namespace {

std::unique_ptr<LocalEngine> OpenBundled(int64_t max_tokens) {
  LocalEngineOptions options;
  options.checkpoint = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
  options.threads = 2;
  options.max_tokens = max_tokens;
  return *LocalEngine::Create(options);
}

TEST(DecodeBenchTest, MeasuresEachSizeInEveryRound) {
  const auto local = OpenBundled(8192);
  const auto points =
      *BenchBatches(*local, {.batches = {1, 3}, .context = 20, .steps = 2, .rounds = 3});
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[1].batch, 3);
  EXPECT_EQ(points[1].tokens_per_s.size(), 3u);
  for (const double ratio : points[0].ratios) EXPECT_EQ(ratio, 1.0);
  for (size_t r = 0; r < 3; ++r) {
    EXPECT_DOUBLE_EQ(points[1].ratios[r], points[1].tokens_per_s[r] / points[0].tokens_per_s[r]);
  }
  EXPECT_EQ(local->pool().slots().num_free(), local->pool().slots().num_pages());
}

TEST(DecodeBenchTest, RefusesNumbersThatAreNotPositive) {
  const auto local = OpenBundled(1024);
  const auto refused = BenchBatches(*local, {.batches = {1, 0}});
  EXPECT_EQ(refused.status().message(), "batches is 0, must be positive");
  EXPECT_EQ(BenchContexts(*local, {.steps = 0}).status().message(), "steps is 0, must be positive");
}

TEST(DecodeBenchTest, TimingOperationsChangesNothing) {
  const auto local = OpenBundled(4096);
  constexpr int64_t kTokens = 40;
  const auto reply = [&](bool is_timed) {
    engine::Sequence sequence = *StartReply(*local, 300, 5, kTokens);
    sequence.sampling.wants_logits_digests = true;
    engine::Sequence* const pointer = &sequence;
    while (!sequence.is_finished()) {
      if (is_timed) {
        const auto seconds = *TimeOperations(*local, {&pointer, 1});
        EXPECT_GT(seconds.at("indexer"), 0.0);
        EXPECT_GT(seconds.at("attention"), 0.0);
      }
      EXPECT_TRUE(local->engine().Step({&pointer, 1}).ok());
    }
    EXPECT_EQ(sequence.num_output_tokens(), kTokens);
    return sequence.logits_crc32c;
  };
  EXPECT_EQ(reply(true), reply(false));
}

TEST(CurveTest, DrawsEverySeriesInsideThePicture) {
  const std::string svg =
      CurveSvg({.title = "a < b",
                .x_label = "tokens",
                .y_label = "ms",
                .series = {{"one", {{0, 0}, {65536, 7.3}}}, {"two", {{5, 1}}}}});
  EXPECT_NE(svg.find("a &lt; b"), std::string::npos);
  EXPECT_NE(svg.find("points=\"70.0,365.0 "), std::string::npos);  // The origin.
  EXPECT_NE(svg.find(">two</text>"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(CurveSvg({.title = "", .x_label = "", .y_label = "", .series = {}}).find("nan"),
            std::string::npos);
}

}  // namespace
}  // namespace isthmus::diag
