// SPDX-License-Identifier: Apache-2.0
// The hyper-connections by hand, by the worked example and unit vectors, and their invariance.
#include "kernels/hyper_connection/hyper_connection.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/workspace.h"
#include "kernels/hyper_connection/hyper_connection_cases.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::NormalValues;
using kernels::testing::SameBits;

// ---- The split of one token's mixes.

TEST(SplitMixesTest, GivesTheWorkedExampleOfTheSpecification) {
  float mixes[kNumMixes];
  float base[kNumMixes];
  for (int i = 0; i < kNumMixes; ++i) {
    mixes[i] = (static_cast<float>(7 * i % 24) - 11.5f) / 4.0f;
    base[i] = (static_cast<float>(5 * i % 24) - 11.5f) / 10.0f;
  }
  const float scale[] = {0.5f, 0.75f, 1.25f};
  float pre[4], post[4], comb[16];
  SplitMixes(mixes, scale, base, 20, 1e-6f, pre, post, comb);

  const float expected_pre[] = {0.06994824f, 0.22926000f, 0.54053684f, 0.82310200f};
  const float expected_post[] = {0.72883116f, 0.48326504f, 1.32244641f, 0.23449661f};
  const float expected_comb[] = {0.04337785f, 0.06915644f, 0.88146912f, 0.00612519f,
                                 0.34970978f, 0.55754540f, 0.04333220f, 0.04937589f,
                                 0.23393755f, 0.37296816f, 0.02898732f, 0.36406086f,
                                 0.37297382f, 0.00032900f, 0.04621036f, 0.58043705f};
  for (int j = 0; j < 4; ++j) {
    EXPECT_NEAR(pre[j], expected_pre[j], 2e-7) << j;
    EXPECT_NEAR(post[j], expected_post[j], 4e-7) << j;
  }
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(comb[i], expected_comb[i], 4e-7) << i;
  // Not converged: the number of passes shows.
  EXPECT_NEAR(comb[0] + comb[1] + comb[2] + comb[3], 1.00013, 2e-6);
}

TEST(SplitMixesTest, EndsInAColumnPass) {
  const std::vector<float> mixes = NormalValues(1, kNumMixes, 2.0f);
  const std::vector<float> base = NormalValues(2, kNumMixes);
  const float scale[] = {1.0f, 1.0f, 1.0f};
  float pre[4], post[4], comb[16];
  for (const int iterations : {1, 2, 20}) {
    SplitMixes(mixes.data(), scale, base.data(), iterations, 0.0f, pre, post, comb);
    for (int k = 0; k < 4; ++k) {
      EXPECT_NEAR(comb[k] + comb[4 + k] + comb[8 + k] + comb[12 + k], 1.0, 3e-7) << k;
    }
  }
}

TEST(SplitMixesTest, CountsTheSoftmaxWithItsColumnsAsTheFirstPass) {
  // Rows (ln 3, 0, 0, 0) and three of zeros: softmax (1/2, 1/6, 1/6, 1/6) and quarters; the columns
  // sum to 5/4 and 11/12.
  std::vector<float> mixes(kNumMixes, 0.0f);
  mixes[8] = std::log(3.0f);
  const std::vector<float> base(kNumMixes, 0.0f);
  const float scale[] = {1.0f, 1.0f, 1.0f};
  float pre[4], post[4], comb[16];
  SplitMixes(mixes.data(), scale, base.data(), 1, 0.0f, pre, post, comb);
  EXPECT_NEAR(comb[0], 0.4, 1e-6);
  EXPECT_NEAR(comb[4], 0.2, 1e-6);
  EXPECT_NEAR(comb[1], 2.0 / 11.0, 1e-6);
  EXPECT_NEAR(comb[5], 3.0 / 11.0, 1e-6);
  EXPECT_EQ(pre[0], 0.5f);
  EXPECT_EQ(post[3], 1.0f);
}

TEST(SplitMixesTest, MatchesTheUnitVectors) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_hc_sinkhorn.safetensors");
  const int64_t tokens = file.dims("params")[0];
  const auto iterations = static_cast<int>(file.dims("params")[2]);
  const std::vector<float> mixes = file.at("mixes").F32();
  const std::vector<float> scale = file.at("hc_scale").F32();
  const std::vector<float> base = file.at("hc_base").F32();
  std::vector<float> pre(tokens * 4), post(tokens * 4), comb(tokens * 16);
  for (int64_t t = 0; t < tokens; ++t) {
    SplitMixes(&mixes[t * kNumMixes], scale.data(), base.data(), iterations, 1e-6f, &pre[t * 4],
               &post[t * 4], &comb[t * 16]);
  }
  const auto expect_near = [](const std::vector<float>& got, const std::vector<float>& expected) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5) << i;
  };
  expect_near(pre, file.at("pre").F32());
  expect_near(post, file.at("post").F32());
  expect_near(comb, file.at("comb").F32());
}

// ---- Pre.

TEST(HyperConnectionPreTest, MatchesATokenComputedByHand) {
  // Streams 1, 2, 3, 4 of one element: mean(v^2) = 7.5. Only fn[0, :] is not zero and picks v[3]:
  // mix[0] = 4 / sqrt(7.5). All the rest is sigmoid(0) and a uniform comb.
  PreCase c(1, 1, 1);
  c.streams = {1, 2, 3, 4};
  std::fill(c.fn.begin(), c.fn.end(), 0.0f);
  c.fn[3] = 1.0f;
  c.base.assign(kNumMixes, 0.0f);
  c.scale = {2.0f, 1.0f, 1.0f};
  c.arithmetic = Arithmetic::kMath;
  c.Run();
  const double first = 1.0 / (1.0 + std::exp(-2.0 * 4.0 / std::sqrt(7.5)));
  EXPECT_NEAR(c.x[0], first * 1 + 0.5 * (2 + 3 + 4), 2e-5);
  for (int j = 0; j < 4; ++j) EXPECT_EQ(c.post[j], 1.0f) << j;
  for (int i = 0; i < 16; ++i) EXPECT_NEAR(c.comb[i], 0.25, 2e-6) << i;
}

TEST(HyperConnectionPreTest, RoundsXAndNothingElse) {
  PreCase exact(3, 5, 64);
  exact.arithmetic = Arithmetic::kMath;
  exact.Run();
  PreCase rounded(3, 5, 64);
  rounded.Run();
  for (float& x : exact.x) x = RoundBf16(x);
  EXPECT_TRUE(SameBits(rounded.x, exact.x));
  EXPECT_TRUE(SameBits(rounded.post, exact.post));
  EXPECT_TRUE(SameBits(rounded.comb, exact.comb));
}

TEST(HyperConnectionPreTest, SplitsAGroupAsEachTokenAlone) {
  // What the lanes of a group compute must be what SplitMixes gives for one token: recompute post
  // and comb of each token in a batch of its own.
  PreCase batch(4, 37, 24);
  batch.Run();
  for (int64_t t = 0; t < 37; ++t) {
    PreCase alone(4, 37, 24);
    alone.KeepToken(t);
    alone.Run();
    EXPECT_TRUE(SameBits(alone.x, std::span(batch.x).subspan(t * 24, 24))) << t;
    EXPECT_TRUE(SameBits(alone.post, std::span(batch.post).subspan(t * 4, 4))) << t;
    EXPECT_TRUE(SameBits(alone.comb, std::span(batch.comb).subspan(t * 16, 16))) << t;
  }
}

TEST(HyperConnectionPreTest, DoesNotDependOnThreadsWorkspaceOrLayout) {
  PreCase alone(5, 70, 256);
  alone.Run();
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    Workspace workspace;
    PreCase c(5, 70, 256);
    c.packed = threads == 2;
    c.Run(HyperConnectionPre, Exec{.threads = &pool, .workspace = &workspace});
    EXPECT_TRUE(SameBits(c.x, alone.x)) << threads;
    EXPECT_TRUE(SameBits(c.post, alone.post)) << threads;
    EXPECT_TRUE(SameBits(c.comb, alone.comb)) << threads;
  }
}

// ---- Post.

TEST(HyperConnectionPostTest, ReadsCombFromSourceToDestination) {
  PostCase c(1, 1, 1);
  c.y = {10};
  c.streams = {1, 2, 3, 4};
  c.post = {1, 0.5f, 0, 0};
  c.comb.assign(16, 0.0f);
  c.comb[2 * 4 + 1] = 7.0f;   // Stream 2 into stream 1.
  c.comb[0 * 4 + 3] = -1.0f;  // Stream 0 into stream 3.
  c.Run();
  EXPECT_EQ(c.out, (std::vector<float>{10, 5 + 21, 0, -1}));
}

TEST(HyperConnectionPostTest, MayWriteTheStreamsInPlace) {
  for (const int64_t hidden : {1, 16, 33, 256}) {
    PostCase apart(6, 3, hidden);
    apart.Run();
    PostCase c(6, 3, hidden);
    HyperConnectionPostArgs args = c.Args();
    args.out = args.streams;
    ASSERT_TRUE(HyperConnectionPost(args, Exec{}).ok());
    EXPECT_TRUE(SameBits(c.streams, apart.out)) << hidden;

    PostCase definition(6, 3, hidden);
    definition.Run(HyperConnectionPostDefinition);
    PostCase in_place(6, 3, hidden);
    args = in_place.Args();
    args.out = args.streams;
    ASSERT_TRUE(HyperConnectionPostDefinition(args, Exec{}).ok());
    EXPECT_TRUE(SameBits(in_place.streams, definition.out)) << hidden;
  }
}

TEST(HyperConnectionPostTest, RoundsOnceInReferenceArithmetic) {
  PostCase exact(7, 4, 48);
  exact.arithmetic = Arithmetic::kMath;
  exact.Run();
  PostCase rounded(7, 4, 48);
  rounded.Run();
  for (float& value : exact.out) value = RoundBf16(value);
  EXPECT_TRUE(SameBits(rounded.out, exact.out));
}

TEST(HyperConnectionPostTest, DoesNotDependOnThreadsOrBatch) {
  PostCase alone(8, 70, 256);
  alone.Run();
  for (const int threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    PostCase c(8, 70, 256);
    c.Run(HyperConnectionPost, Exec{.threads = &pool});
    EXPECT_TRUE(SameBits(c.out, alone.out)) << threads;
  }
  for (const int64_t t : {0, 1, 69}) {
    PostCase c(8, 70, 256);
    HyperConnectionPostArgs args = c.Args();
    args.y = args.y.Rows(t, 1);
    args.streams = args.streams.Rows(t, 1);
    args.post = args.post.Rows(t, 1);
    args.comb = args.comb.Rows(t, 1);
    args.out = args.out.Rows(0, 1);
    ASSERT_TRUE(HyperConnectionPost(args, Exec{}).ok());
    EXPECT_TRUE(SameBits(std::span(c.out).first(4 * 256),
                         std::span(alone.out).subspan(t * 4 * 256, 4 * 256)));
  }
}

// ---- Head.

TEST(HyperConnectionHeadTest, MatchesATokenComputedByHand) {
  HeadCase c(1, 1, 1);
  c.streams = {1, 2, 3, 4};
  std::fill(c.fn.begin(), c.fn.end(), 0.0f);
  c.fn[1 * 4 + 2] = 1.0f;  // mix[1] = 3 / sqrt(7.5).
  c.base.assign(4, 0.0f);
  c.scale = {0.5f};
  c.arithmetic = Arithmetic::kMath;
  c.Run();
  const double second = 1.0 / (1.0 + std::exp(-0.5 * 3.0 / std::sqrt(7.5)));
  EXPECT_NEAR(c.x[0], 0.5 * (1 + 3 + 4) + second * 2, 2e-5);
}

TEST(HyperConnectionHeadTest, DoesNotDependOnThreadsOrBatch) {
  HeadCase alone(9, 20, 256);
  alone.Run();
  ThreadPool pool(2);
  HeadCase c(9, 20, 256);
  c.Run(HyperConnectionHead, Exec{.threads = &pool});
  EXPECT_TRUE(SameBits(c.x, alone.x));
  HeadCase last(9, 20, 256);
  HyperConnectionHeadArgs args = last.Args();
  args.streams = args.streams.Rows(19, 1);
  args.x = args.x.Rows(0, 1);
  ASSERT_TRUE(HyperConnectionHead(args, Exec{}).ok());
  EXPECT_TRUE(SameBits(std::span(last.x).first(256), std::span(alone.x).subspan(19 * 256, 256)));
}

TEST(HyperConnectionTest, TakesNoTokens) {
  PreCase pre(1, 1, 8);
  HyperConnectionPreArgs pre_args = pre.Args();
  pre_args.streams.rows = pre_args.x.rows = pre_args.post.rows = pre_args.comb.rows = 0;
  EXPECT_TRUE(HyperConnectionPre(pre_args, Exec{}).ok());
  HeadCase head(1, 1, 8);
  HyperConnectionHeadArgs head_args = head.Args();
  head_args.streams.rows = head_args.x.rows = 0;
  EXPECT_TRUE(HyperConnectionHead(head_args, Exec{}).ok());
}

using HyperConnectionTargetTest = kernels::testing::SimdTargetTest;

TEST_P(HyperConnectionTargetTest, GivesTheBitsOfTheBestTarget) {
  for (const int64_t hidden : {5, 16, 40, 256}) {
    PreCase pre(10, 21, hidden), best_pre(10, 21, hidden);
    PostCase post(11, 5, hidden), best_post(11, 5, hidden);
    HeadCase head(12, 5, hidden), best_head(12, 5, hidden);
    pre.Run();
    post.Run();
    head.Run();
    kernels::testing::ForceTarget(0);
    best_pre.Run();
    best_post.Run();
    best_head.Run();
    kernels::testing::ForceTarget(GetParam());
    EXPECT_TRUE(SameBits(pre.x, best_pre.x)) << hidden;
    EXPECT_TRUE(SameBits(pre.post, best_pre.post)) << hidden;
    EXPECT_TRUE(SameBits(pre.comb, best_pre.comb)) << hidden;
    EXPECT_TRUE(SameBits(post.out, best_post.out)) << hidden;
    EXPECT_TRUE(SameBits(head.x, best_head.x)) << hidden;
  }
}
ISTHMUS_INSTANTIATE_SIMD_TARGETS(HyperConnectionTargetTest);

}  // namespace
}  // namespace isthmus::kernels
