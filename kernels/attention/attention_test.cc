// SPDX-License-Identifier: Apache-2.0
// Attention: values by hand, refusals, the golden vector, bounds against the definition at the
// model's shapes, and the same bits whatever the chunks, batch, threads and SIMD target.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention_sequence.h"
#include "kernels/attention/attention_variants.h"
#include "kernels/core/workspace.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;
using testing::WithinBound;
using Sequence = testing::AttentionSequence;
using Shape = testing::AttentionShape;

// ---- By hand. With q = 0 every score is 0, so each key and the sink (0) have equal weights.

class AttentionByHandTest
    : public ::testing::TestWithParam<absl::Status (*)(const AttentionArgs&, const Exec&)> {
 protected:
  static constexpr size_t kDim = 128;

  // Three positions of head_dim 128 whose channels are 6, 12 and 24, a window of 2.
  static std::unique_ptr<Sequence> Make(int ratio, int64_t tokens) {
    auto sequence = std::make_unique<Sequence>(Shape{.window = 2, .ratio = ratio}, tokens, 1);
    std::fill(sequence->q.begin(), sequence->q.end(), 0.0f);
    std::fill(sequence->sink.begin(), sequence->sink.end(), 0.0f);
    for (size_t t = 0; t < static_cast<size_t>(tokens); ++t) {
      std::fill_n(sequence->kv.begin() + static_cast<int64_t>(kDim * t), kDim,
                  6.0f * static_cast<float>(1 << t));
    }
    return sequence;
  }
};

TEST_P(AttentionByHandTest, AveragesTheWindowWithTheSinkInTheDenominator) {
  auto sequence = Make(0, 3);
  std::vector<float> out(3 * kDim);
  ASSERT_TRUE(GetParam()(sequence->Args(0, 3, out.data()), Exec{}).ok());
  EXPECT_FLOAT_EQ(out[0], 3.0f);          // 6 / (1 + sink)
  EXPECT_FLOAT_EQ(out[kDim], 6.0f);       // (6 + 12) / 3
  EXPECT_FLOAT_EQ(out[2 * kDim], 12.0f);  // (12 + 24) / 3: position 0 left the window
  EXPECT_FLOAT_EQ(out[3 * kDim - 1], 12.0f);
}

TEST_P(AttentionByHandTest, TheSinkIsNotScaledAndNotInTheMaximum) {
  auto sequence = Make(0, 1);
  sequence->sink[0] = std::log(5.0f);
  std::vector<float> out(kDim);
  ASSERT_TRUE(GetParam()(sequence->Args(0, 1, out.data()), Exec{}).ok());
  EXPECT_FLOAT_EQ(out[0], 1.0f);  // 6 / (1 + 5)
}

TEST_P(AttentionByHandTest, WeightsFollowTheScaledScores) {
  auto sequence = Make(0, 2);
  for (size_t d = kDim; d < 2 * kDim; ++d) sequence->q[d] = 1.0f;
  AttentionArgs args = sequence->Args(0, 2, nullptr);
  std::vector<float> out(2 * kDim);
  args.out = F32Matrix(out.data(), 2, kDim);
  args.scale = std::log(2.0f) / 768.0f;  // Scores of 128 * 6 and 128 * 12 become ln 2 and 2 ln 2.
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  // With M = 2 ln 2: (6 / 2 + 12) / (1 / 2 + 1 + 1 / 4).
  EXPECT_NEAR(out[kDim], 15.0f / 1.75f, 1e-5f);
}

TEST_P(AttentionByHandTest, AnEntryIsVisibleToTheTokenThatCompletesIt) {
  auto sequence = Make(4, 4);
  std::vector<float> entry(kDim, 60.0f);
  sequence->WriteEntry(0, entry.data());
  std::vector<float> out(4 * kDim);
  ASSERT_TRUE(GetParam()(sequence->Args(0, 4, out.data()), Exec{}).ok());
  EXPECT_FLOAT_EQ(out[2 * kDim], 12.0f);  // Position 2 does not see it.
  EXPECT_FLOAT_EQ(out[3 * kDim], (24.0f + 48.0f + 60.0f) / 4.0f);
}

TEST_P(AttentionByHandTest, UnselectedEntriesContributeNothing) {
  auto sequence = Make(4, 8);
  std::vector<float> entry(kDim, 60.0f);
  sequence->WriteEntry(0, entry.data());
  std::fill(entry.begin(), entry.end(), 600.0f);
  sequence->WriteEntry(1, entry.data());
  sequence->max_selected = 2;
  sequence->selected.assign(16, -1);
  sequence->selected[15] = 0;  // Of position 7, behind a hole.
  std::vector<float> out(8 * kDim);
  ASSERT_TRUE(GetParam()(sequence->Args(0, 8, out.data()), Exec{}).ok());
  EXPECT_FLOAT_EQ(out[6 * kDim], (192.0f + 384.0f) / 3.0f);
  EXPECT_FLOAT_EQ(out[7 * kDim], (384.0f + 768.0f + 60.0f) / 4.0f);
}

INSTANTIATE_TEST_SUITE_P(All, AttentionByHandTest,
                         ::testing::Values(&Attention, &AttentionDefinition, &AttentionNaive));

// ---- Refusals.

class AttentionRefusalTest : public ::testing::Test {
 protected:
  AttentionRefusalTest() : sequence_({.heads = 2, .head_dim = 128, .ratio = 4}, 8, 7) {
    sequence_.SelectSome(2, 3);
    out_.resize(8 * 256);
    args_ = sequence_.Args(0, 8, out_.data());
  }
  void ExpectRefused(const char* part) {
    const absl::Status status = Attention(args_, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(part), std::string::npos) << status;
  }

  Sequence sequence_;
  std::vector<float> out_;
  AttentionArgs args_;
};

TEST_F(AttentionRefusalTest, AcceptsTheArgumentsThatTheOthersSpoil) {
  EXPECT_TRUE(Attention(args_, Exec{}).ok());
}
TEST_F(AttentionRefusalTest, RefusesAHeadDimThatIsNoMultipleOf16) {
  args_.head_dim = 120;
  ExpectRefused("head_dim 120");
}
TEST_F(AttentionRefusalTest, RefusesAnOutputOfAnotherShape) {
  args_.out.cols = 128;
  ExpectRefused("attention: out is [8, 128]");
}
TEST_F(AttentionRefusalTest, RefusesTooFewKvRows) {
  args_.chunk_kv.rows = 7;
  ExpectRefused("attention: chunk_kv is [7, 128]");
}
TEST_F(AttentionRefusalTest, RefusesASinkOfAnotherSize) {
  args_.sink.size = 3;
  ExpectRefused("sink has 3 elements, num_heads is 2");
}
TEST_F(AttentionRefusalTest, RefusesRowsThatNoSequenceOwns) {
  SequenceKv view = args_.sequences[0];
  view.num_rows = 7;
  args_.sequences = {&view, 1};
  ExpectRefused("sequences own 7 rows, the batch has 8");
}
TEST_F(AttentionRefusalTest, RefusesASelectedEntryThatIsNotVisible) {
  sequence_.selected[7] = 1;  // Position 3 sees one entry.
  ExpectRefused("selected[3][1] is 1, the row sees 1 entries");
}
TEST_F(AttentionRefusalTest, RefusesASequenceWithoutPages) {
  SequenceKv view = args_.sequences[0];
  view.pages[kCsaKv] = {};
  args_.sequences = {&view, 1};
  ExpectRefused("pages for 0 entries, needs 2");
}
TEST_F(AttentionRefusalTest, RefusesASequenceWithoutAStateSlot) {
  SequenceKv view = args_.sequences[0];
  view.state = nullptr;
  args_.sequences = {&view, 1};
  ExpectRefused("no state slot");
}
TEST_F(AttentionRefusalTest, RefusesARingOfAnotherSizeThanTheWindow) {
  args_.window = 64;
  ExpectRefused("the ring has 128 entries, window is 64");
}
TEST_F(AttentionRefusalTest, RefusesAnotherArchitecture) {
  EXPECT_EQ(Attention(args_, Exec{.arch = 5}).code(), absl::StatusCode::kUnimplemented);
}

// ---- The golden vector. Each query becomes a sequence of its own, with a window of one (its first
// index) and its other indices as entries, repeats included.

TEST(AttentionTest, MatchesTheGoldenVector) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_sparse_attn.safetensors");
  const auto dims = file.dims();  // b, m, heads, d, n, k
  const int64_t rows = dims[1], heads = dims[2], d = dims[3], k = dims[5];
  const auto q = file.at("q").F32();
  const auto kv = file.at("kv").F32();
  const auto indices = file.at("topk_idxs").Ints();
  const auto expected = file.at("o_ref").F32();
  for (int64_t t = 0; t < rows; ++t) {
    std::vector<int64_t> picked;
    for (int64_t i = 0; i < k; ++i) {
      const int64_t index = indices[static_cast<size_t>(t * k + i)];
      if (index >= 0) picked.push_back(index);
    }
    ASSERT_FALSE(picked.empty());
    const Shape shape = {.heads = heads, .head_dim = static_cast<int>(d), .window = 1, .ratio = 4};
    const int64_t tokens = 4 * k;
    Sequence sequence(shape, tokens, 5);
    sequence.sink = file.at("attn_sink").F32();
    std::copy_n(q.begin() + t * heads * d, heads * d, sequence.q.end() - heads * d);
    std::copy_n(kv.begin() + picked[0] * d, d, sequence.kv.end() - d);
    sequence.max_selected = k;
    sequence.selected.assign(static_cast<size_t>(tokens * k), -1);
    for (size_t i = 1; i < picked.size(); ++i) {
      std::vector<float> entry(kv.begin() + picked[i] * d, kv.begin() + (picked[i] + 1) * d);
      sequence.WriteEntry(static_cast<int64_t>(i - 1), entry.data());
      sequence.selected[sequence.selected.size() - picked.size() + i] = static_cast<int32_t>(i - 1);
    }
    std::vector<float> out(static_cast<size_t>(heads * d));
    AttentionArgs args = sequence.Args(tokens - 1, tokens, out.data());
    args.scale = file.at("scale").F32()[0];
    ASSERT_TRUE(Attention(args, Exec{}).ok());
    const std::vector<float> want(expected.begin() + t * heads * d,
                                  expected.begin() + (t + 1) * heads * d);
    EXPECT_TRUE(testing::WithinRelativeL2(out, want, 1e-2)) << "query " << t;
  }
}

// ---- Bounds at the model's shapes.

struct BoundCase {
  const char* name;
  Shape shape;
  int64_t start;
  int64_t rows;
  int64_t max_selected;  // 0: all visible entries.
};
void PrintTo(const BoundCase& c, std::ostream* os) { *os << c.name; }

const BoundCase kBoundCases[] = {
    {"WindowOnly", {64, 512, 64, 128, 0, Arithmetic::kMath}, 200, 2, 0},
    {"CsaMath", {64, 512, 64, 128, 4, Arithmetic::kMath}, 2600, 2, 512},
    {"CsaReference", {64, 512, 64, 128, 4, Arithmetic::kReference}, 2600, 3, 512},
    {"HcaReference", {64, 512, 64, 128, 128, Arithmetic::kReference}, 4000, 2, 0},
    {"SmallHeads", {3, 128, 64, 128, 4, Arithmetic::kReference}, 130, 5, 16},
};

class AttentionBoundTest
    : public ::testing::TestWithParam<std::tuple<AttentionVariant, BoundCase>> {};

TEST_P(AttentionBoundTest, StaysWithinItsBound) {
  const auto& [variant, c] = GetParam();
  const int64_t end = c.start + c.rows;
  Sequence sequence(c.shape, end, 11);
  for (int64_t p = std::max<int64_t>(0, c.start - c.shape.window); p < c.start; ++p) {
    sequence.WriteRing(p);
  }
  if (c.max_selected > 0) sequence.SelectSome(c.max_selected, 12);
  const int64_t size = c.rows * c.shape.heads * c.shape.head_dim;
  std::vector<float> exact(static_cast<size_t>(size));
  std::vector<float> naive(exact);
  testing::GuardedFloats out(size);
  ASSERT_TRUE(AttentionDefinition(sequence.Args(c.start, end, exact.data()), Exec{}).ok());
  ASSERT_TRUE(AttentionNaive(sequence.Args(c.start, end, naive.data()), Exec{}).ok());
  ASSERT_TRUE(variant.launch(sequence.Args(c.start, end, out.data()), Exec{}).ok());

  const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
  EXPECT_TRUE(WithinBound(out.values(), naive, exact, bound));
  EXPECT_TRUE(out.Intact());
}

INSTANTIATE_TEST_SUITE_P(
    Table, AttentionBoundTest,
    ::testing::Combine(::testing::ValuesIn(testing::CpuVariants(AttentionVariants())),
                       ::testing::ValuesIn(kBoundCases)),
    [](const auto& test) { return std::get<1>(test.param).name; });

// ---- The same bits.

struct BitsCase {
  const char* name;
  Shape shape;
  int64_t tokens;
  int64_t max_selected;
};
void PrintTo(const BitsCase& c, std::ostream* os) { *os << c.name; }

const BitsCase kBitsCases[] = {
    {"WindowMath", {5, 128, 64, 128, 0, Arithmetic::kMath}, 300, 0},
    {"WindowReference", {5, 128, 64, 128, 0, Arithmetic::kReference}, 300, 0},
    {"CsaMath", {9, 128, 64, 128, 4, Arithmetic::kMath}, 300, 40},
    {"CsaReference", {9, 128, 64, 128, 4, Arithmetic::kReference}, 300, 40},
    {"HcaReference", {4, 192, 64, 128, 128, Arithmetic::kReference}, 400, 0},
    {"SmallWindow", {2, 128, 64, 3, 4, Arithmetic::kReference}, 50, 5},
};

class AttentionBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  struct Result {
    std::vector<float> out;
    std::vector<uint64_t> state;
  };
  // Runs the whole sequence in chunks: `first` tokens, then `chunk` at a time.
  static Result Run(int64_t first, int64_t chunk, const Exec& exec) {
    const BitsCase& c = GetParam();
    Sequence sequence(c.shape, c.tokens, 21);
    if (c.max_selected > 0) sequence.SelectSome(c.max_selected, 22);
    const int64_t width = c.shape.heads * c.shape.head_dim;
    Result result;
    result.out.resize(static_cast<size_t>(c.tokens * width));
    for (int64_t begin = 0; begin < c.tokens;) {
      const int64_t end = std::min(c.tokens, begin + (begin == 0 ? first : chunk));
      const absl::Status status =
          Attention(sequence.Args(begin, end, result.out.data() + begin * width), exec);
      EXPECT_TRUE(status.ok()) << status;
      begin = end;
    }
    result.state = sequence.cache().state_words();
    return result;
  }
};

TEST_P(AttentionBitsTest, DoNotDependOnTheChunks) {
  const Result whole = Run(GetParam().tokens, 1, Exec{});
  for (float value : whole.out) ASSERT_TRUE(std::isfinite(value));
  for (int64_t chunk : {1, 3, 4, 5, 127, 128, 129}) {
    const Result cut = Run(chunk, chunk, Exec{});
    EXPECT_TRUE(SameBits(cut.out, whole.out)) << "chunks of " << chunk;
    EXPECT_EQ(cut.state, whole.state) << "chunks of " << chunk;
  }
  for (int64_t prefill : {2, 37, 131}) {
    EXPECT_TRUE(SameBits(Run(prefill, 1, Exec{}).out, whole.out)) << "prefill of " << prefill;
  }
}

TEST_P(AttentionBitsTest, DoNotDependOnTheThreads) {
  const Result one = Run(64, 64, Exec{});
  for (int threads : {2, 3}) {
    ThreadPool pool(threads);
    Workspace workspace;
    const Exec exec = {.threads = &pool, .workspace = &workspace};
    const Result many = Run(64, 64, exec);
    EXPECT_TRUE(SameBits(many.out, one.out)) << threads << " threads";
    EXPECT_EQ(many.state, one.state) << threads << " threads";
    EXPECT_TRUE(SameBits(Run(200, 1, exec).out, one.out)) << threads << " threads, decode";
  }
}

TEST_P(AttentionBitsTest, DoNotDependOnTheSimdTarget) {
  const Result best = Run(64, 64, Exec{});
  const int targets = testing::ForEachTarget([&] {
    const Result forced = Run(64, 64, Exec{});
    EXPECT_TRUE(SameBits(forced.out, best.out));
    EXPECT_EQ(forced.state, best.state);
  });
  EXPECT_GE(targets, 1);
}

TEST_P(AttentionBitsTest, DoNotDependOnTheBatchOrOnAliasing) {
  const BitsCase& c = GetParam();
  const Result whole = Run(c.tokens, 1, Exec{});
  Sequence a(c.shape, c.tokens, 21);
  if (c.max_selected > 0) a.SelectSome(c.max_selected, 22);
  const int64_t width = c.shape.heads * c.shape.head_dim;
  const int64_t d = c.shape.head_dim;
  const int64_t split = c.tokens - 7;  // Two sequences of one batch: the same tokens, cut apart.
  Sequence b(c.shape, c.tokens, 21);
  for (int64_t p = std::max<int64_t>(0, split - c.shape.window); p < split; ++p) b.WriteRing(p);
  std::vector<float> q = a.q;  // Attention in place.
  AttentionArgs args = a.Args(0, c.tokens, q.data());
  args.q.data = q.data();
  const SequenceKv views[] = {a.cache().View(0, split, 0), b.cache().View(split, 7, split)};
  args.sequences = views;
  ASSERT_EQ(args.chunk_kv.cols, d);
  ASSERT_TRUE(Attention(args, Exec{}).ok());
  EXPECT_TRUE(SameBits(q, whole.out));
  ASSERT_EQ(static_cast<int64_t>(q.size()), c.tokens * width);
}

INSTANTIATE_TEST_SUITE_P(Shapes, AttentionBitsTest, ::testing::ValuesIn(kBitsCases),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace isthmus::kernels
