// SPDX-License-Identifier: Apache-2.0
// Refusals of the hyper-connection operations, and every variant against its bound at the real
// shapes.
#include <cmath>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/hyper_connection/hyper_connection_cases.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "kernels/testing/compare.h"

namespace isthmus::kernels {

template <typename Args>
void PrintTo(const HyperConnectionVariant<Args>& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using kernels::testing::GuardedFloats;
using kernels::testing::WithinBound;
using ::testing::HasSubstr;

// ---- Refusals.

template <typename Args>
void ExpectRefused(absl::Status (*operation)(const Args&, const Exec&),
                   absl::Status (*definition)(const Args&, const Exec&), const Args& args,
                   const char* reason) {
  const absl::Status status = operation(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(reason));
  EXPECT_EQ(definition(args, Exec{}), status);
}
void ExpectRefused(const HyperConnectionPreArgs& args, const char* reason) {
  ExpectRefused(HyperConnectionPre, HyperConnectionPreDefinition, args, reason);
}
void ExpectRefused(const HyperConnectionPostArgs& args, const char* reason) {
  ExpectRefused(HyperConnectionPost, HyperConnectionPostDefinition, args, reason);
}
void ExpectRefused(const HyperConnectionHeadArgs& args, const char* reason) {
  ExpectRefused(HyperConnectionHead, HyperConnectionHeadDefinition, args, reason);
}

TEST(HyperConnectionPreTest, RefusesShapesThatDisagree) {
  PreCase c(1, 2, 8);
  HyperConnectionPreArgs args = c.Args();
  args.streams.cols = 31;
  args.streams.row_stride = 32;
  ExpectRefused(args, "streams is [2, 31], expected [2, 32]");
  args = c.Args();
  args.x.rows = 1;
  ExpectRefused(args, "x is [1, 8], expected [2, 8]");
  args = c.Args();
  args.fn.rows = 4;
  ExpectRefused(args, "fn is [4, 32], expected [24, 32]");
  args = c.Args();
  args.post.cols = 5;
  ExpectRefused(args, "post is [2, 5], expected [2, 4]");
  args = c.Args();
  args.comb.rows = 3;
  ExpectRefused(args, "comb is [3, 16], expected [2, 16]");
  args = c.Args();
  args.scale.size = 1;
  ExpectRefused(args, "scale has size 1");
  args = c.Args();
  args.base.size = 4;
  ExpectRefused(args, "base has size 4");
}

TEST(HyperConnectionPreTest, RefusesTypesOtherThanF32) {
  PreCase c(1, 2, 8);
  HyperConnectionPreArgs args = c.Args();
  args.fn.format = WeightFormat::kBf16;
  ExpectRefused(args, "fn must be f32");
  args = c.Args();
  args.streams.dtype = DType::kBf16;
  ExpectRefused(args, "streams must be f32");
}

TEST(HyperConnectionPreTest, RefusesNumbersOfPassesOutOfBounds) {
  PreCase c(1, 2, 8);
  HyperConnectionPreArgs args = c.Args();
  for (const int iterations : {0, -1, 1001}) {
    args.sinkhorn_iterations = iterations;
    ExpectRefused(args, "sinkhorn_iterations is");
  }
}

TEST(HyperConnectionPreTest, RefusesEpsilonsThatAreNoNumbers) {
  PreCase c(1, 2, 8);
  HyperConnectionPreArgs args = c.Args();
  args.hc_epsilon = std::nanf("");
  ExpectRefused(args, "hc_epsilon nan");
  args.epsilon = -1.0f;
  ExpectRefused(args, "epsilon is -1");
}

TEST(HyperConnectionPostTest, RefusesShapesThatDisagree) {
  PostCase c(1, 2, 8);
  HyperConnectionPostArgs args = c.Args();
  args.streams.rows = 1;
  ExpectRefused(args, "streams is [1, 32], expected [2, 32]");
  args = c.Args();
  args.post.rows = 1;
  ExpectRefused(args, "post is [1, 4]");
  args = c.Args();
  args.comb.cols = 4;
  ExpectRefused(args, "comb is [2, 4]");
  args = c.Args();
  args.out.cols = 8;
  ExpectRefused(args, "out is [2, 8]");
  args = c.Args();
  args.y.row_stride = 7;
  ExpectRefused(args, "y has row stride 7");
}

TEST(HyperConnectionPostTest, RefusesAnOutputThatIsTheStreamsWithOtherRows) {
  PostCase c(1, 2, 8);
  HyperConnectionPostArgs args = c.Args();
  args.streams.row_stride = 40;
  args.out = args.streams;
  args.out.row_stride = 32;
  ExpectRefused(args, "out is streams with row stride 32 instead of 40");
}

TEST(HyperConnectionHeadTest, RefusesShapesThatDisagree) {
  HeadCase c(1, 2, 8);
  HyperConnectionHeadArgs args = c.Args();
  args.fn.rows = 24;
  ExpectRefused(args, "fn is [24, 32], expected [4, 32]");
  args = c.Args();
  args.scale.size = 3;
  ExpectRefused(args, "scale has size 3");
  args = c.Args();
  args.x.cols = 0;
  ExpectRefused(args, "hidden must be at least 1");
}

TEST(HyperConnectionTest, SaysWhenAnArchitectureHasNoVariant) {
  const Exec exec = {.arch = 5};  // Older than any CUDA device.
  EXPECT_EQ(HyperConnectionPre(PreCase(1, 1, 8).Args(), exec).code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(HyperConnectionPost(PostCase(1, 1, 8).Args(), exec).code(),
            absl::StatusCode::kUnimplemented);
  EXPECT_EQ(HyperConnectionHead(HeadCase(1, 1, 8).Args(), exec).code(),
            absl::StatusCode::kUnimplemented);
}

// ---- Naive forms: the definitions' loops in f32.

float NaiveSigmoid(float z) { return 1.0f / (1.0f + std::exp(-z)); }

std::vector<float> NaiveMixes(const float* v, const MixCase& c) {
  float sum_of_squares = 0.0f;
  const int64_t width = 4 * c.hidden;
  for (int64_t i = 0; i < width; ++i) sum_of_squares += v[i] * v[i];
  const float r = 1.0f / std::sqrt(sum_of_squares / static_cast<float>(width) + 1e-6f);
  std::vector<float> mixes(c.mixes);
  for (int64_t k = 0; k < c.mixes; ++k) {
    float sum = 0.0f;
    for (int64_t i = 0; i < width; ++i) sum += c.fn[k * width + i] * v[i];
    mixes[k] = r * sum;
  }
  return mixes;
}

void NaiveCombine(const float* v, const float* pre, int64_t hidden, float* x) {
  for (int64_t d = 0; d < hidden; ++d) {
    float sum = 0.0f;
    for (int64_t m = 0; m < 4; ++m) sum += pre[m] * v[m * hidden + d];
    x[d] = sum;
  }
}

void NaiveLines(int start, int step, float* c) {
  for (int line = 0; line < 4; ++line) {
    float sum = 0.0f;
    for (int i = 0; i < 4; ++i) sum += c[line * start + i * step];
    for (int i = 0; i < 4; ++i) c[line * start + i * step] /= sum + 1e-6f;
  }
}

void NaivePre(PreCase& c) {
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float* v = &c.streams[t * 4 * c.hidden];
    const std::vector<float> mix = NaiveMixes(v, c);
    float pre[4];
    for (int j = 0; j < 4; ++j) {
      pre[j] = NaiveSigmoid(mix[j] * c.scale[0] + c.base[j]) + 1e-6f;
      c.post[t * 4 + j] = 2.0f * NaiveSigmoid(mix[4 + j] * c.scale[1] + c.base[4 + j]);
    }
    float* comb = &c.comb[t * 16];
    for (int j = 0; j < 4; ++j) {
      float sum = 0.0f;
      for (int i = 4 * j; i < 4 * j + 4; ++i) {
        comb[i] = std::exp(mix[8 + i] * c.scale[2] + c.base[8 + i]);
        sum += comb[i];
      }
      for (int i = 4 * j; i < 4 * j + 4; ++i) comb[i] = comb[i] / sum + 1e-6f;
    }
    NaiveLines(1, 4, comb);
    for (int pass = 1; pass < 20; ++pass) {
      NaiveLines(4, 1, comb);
      NaiveLines(1, 4, comb);
    }
    NaiveCombine(v, pre, c.hidden, &c.x[t * c.hidden]);
  }
}

void NaivePost(PostCase& c) {
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t j = 0; j < 4; ++j) {
      for (int64_t d = 0; d < c.hidden; ++d) {
        float sum = c.post[t * 4 + j] * c.y[t * c.hidden + d];
        for (int64_t i = 0; i < 4; ++i) {
          sum += c.comb[t * 16 + i * 4 + j] * c.streams[(t * 4 + i) * c.hidden + d];
        }
        c.out[(t * 4 + j) * c.hidden + d] = sum;
      }
    }
  }
}

void NaiveHead(HeadCase& c) {
  for (int64_t t = 0; t < c.tokens; ++t) {
    const float* v = &c.streams[t * 4 * c.hidden];
    const std::vector<float> mix = NaiveMixes(v, c);
    float pre[4];
    for (int m = 0; m < 4; ++m) {
      pre[m] = NaiveSigmoid(mix[m] * c.scale[0] + c.base[m]) + 1e-6f;
    }
    NaiveCombine(v, pre, c.hidden, &c.x[t * c.hidden]);
  }
}

// ---- Bounds. Each suite runs once per table entry: a new variant is tested by being listed.

template <typename Variant>
NumericBound BoundOf(const Variant& variant) {
  return variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
}

using PreVariant = HyperConnectionVariant<HyperConnectionPreArgs>;
class HyperConnectionPreVariantTest : public ::testing::TestWithParam<PreVariant> {};

TEST_P(HyperConnectionPreVariantTest, StaysWithinItsBound) {
  const PreVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  for (const int64_t hidden : {33, 256, 4096}) {
    const int64_t tokens = 19;
    PreCase c(20, tokens, hidden), exact(20, tokens, hidden), naive(20, tokens, hidden);
    c.arithmetic = exact.arithmetic = Arithmetic::kMath;
    GuardedFloats x(tokens * hidden), post(tokens * 4), comb(tokens * 16);
    HyperConnectionPreArgs args = c.Args();
    args.x.data = x.data();
    args.post.data = post.data();
    args.comb.data = comb.data();
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    exact.Run(HyperConnectionPreDefinition);
    NaivePre(naive);
    const NumericBound bound = BoundOf(variant);
    EXPECT_TRUE(WithinBound(x.values(), naive.x, exact.x, bound)) << "hidden " << hidden;
    EXPECT_TRUE(WithinBound(post.values(), naive.post, exact.post, bound)) << "hidden " << hidden;
    EXPECT_TRUE(WithinBound(comb.values(), naive.comb, exact.comb, bound)) << "hidden " << hidden;
    EXPECT_TRUE(x.Intact() && post.Intact() && comb.Intact());
  }
}
INSTANTIATE_TEST_SUITE_P(Table, HyperConnectionPreVariantTest,
                         ::testing::ValuesIn(HyperConnectionPreVariants().begin(),
                                             HyperConnectionPreVariants().end()));

using PostVariant = HyperConnectionVariant<HyperConnectionPostArgs>;
class HyperConnectionPostVariantTest : public ::testing::TestWithParam<PostVariant> {};

TEST_P(HyperConnectionPostVariantTest, StaysWithinItsBound) {
  const PostVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  for (const int64_t hidden : {33, 256, 4096}) {
    PostCase c(21, 11, hidden), exact(21, 11, hidden), naive(21, 11, hidden);
    c.arithmetic = exact.arithmetic = Arithmetic::kMath;
    GuardedFloats out(11 * 4 * hidden);
    HyperConnectionPostArgs args = c.Args();
    args.out.data = out.data();
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    exact.Run(HyperConnectionPostDefinition);
    NaivePost(naive);
    EXPECT_TRUE(WithinBound(out.values(), naive.out, exact.out, BoundOf(variant)))
        << "hidden " << hidden;
    EXPECT_TRUE(out.Intact());
  }
}
INSTANTIATE_TEST_SUITE_P(Table, HyperConnectionPostVariantTest,
                         ::testing::ValuesIn(HyperConnectionPostVariants().begin(),
                                             HyperConnectionPostVariants().end()));

using HeadVariant = HyperConnectionVariant<HyperConnectionHeadArgs>;
class HyperConnectionHeadVariantTest : public ::testing::TestWithParam<HeadVariant> {};

TEST_P(HyperConnectionHeadVariantTest, StaysWithinItsBound) {
  const HeadVariant& variant = GetParam();
  if (variant.arches.begin != kArchCpu) GTEST_SKIP() << "needs sm_" << variant.arches.begin;
  for (const int64_t hidden : {33, 256, 4096}) {
    HeadCase c(22, 11, hidden), exact(22, 11, hidden), naive(22, 11, hidden);
    c.arithmetic = exact.arithmetic = Arithmetic::kMath;
    GuardedFloats x(11 * hidden);
    HyperConnectionHeadArgs args = c.Args();
    args.x.data = x.data();
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    exact.Run(HyperConnectionHeadDefinition);
    NaiveHead(naive);
    EXPECT_TRUE(WithinBound(x.values(), naive.x, exact.x, BoundOf(variant))) << "hidden " << hidden;
    EXPECT_TRUE(x.Intact());
  }
}
INSTANTIATE_TEST_SUITE_P(Table, HyperConnectionHeadVariantTest,
                         ::testing::ValuesIn(HyperConnectionHeadVariants().begin(),
                                             HyperConnectionHeadVariants().end()));

}  // namespace
}  // namespace isthmus::kernels
