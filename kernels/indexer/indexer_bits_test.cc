// SPDX-License-Identifier: Apache-2.0
// The indexer: bounds against the definition at the model's shapes, and the same bits whatever the
// chunks, batch, threads and SIMD target.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/workspace.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_sequence.h"
#include "kernels/indexer/indexer_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;
using Sequence = testing::IndexerSequence;
using Shape = testing::IndexerShape;

// ---- Bounds at the model's shapes.

struct BoundCase {
  const char* name;
  Shape shape;
  int64_t start;
  int64_t rows;
};
void PrintTo(const BoundCase& c, std::ostream* os) { *os << c.name; }

const BoundCase kBoundCases[] = {
    {"Math", {64, 512, 128, Arithmetic::kMath}, 12000, 2},
    {"Reference", {64, 512, 128, Arithmetic::kReference}, 12000, 3},
    {"FewHeads", {5, 16, 128, Arithmetic::kReference}, 300, 9},
};

class IndexerBoundTest : public ::testing::TestWithParam<std::tuple<IndexerVariant, BoundCase>> {};

struct Scored {
  std::vector<float> scores;
  std::vector<int32_t> selected;
};

Scored RunOperation(const BoundCase& c, Sequence& sequence,
                    absl::Status (*operation)(const IndexerArgs&, const Exec&)) {
  Scored out;
  const int64_t end = c.start + c.rows;
  const int64_t stride = end / kIndexRatio + 3;
  out.scores.resize(static_cast<size_t>(c.rows * stride));
  out.selected.resize(static_cast<size_t>(c.rows * c.shape.topk));
  IndexerArgs args = sequence.Args(c.start, end, out.selected.data());
  args.scores = out.scores.data();
  args.scores_stride = stride;
  const absl::Status status = operation(args, Exec{});
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// Bits of the model's values, so that flips count only where a score was rounded elsewhere.
int64_t Different(const std::vector<float>& a, const std::vector<float>& b) {
  int64_t count = 0;
  for (size_t i = 0; i < a.size(); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

TEST_P(IndexerBoundTest, StaysWithinItsBound) {
  const auto& [variant, c] = GetParam();
  Sequence sequence(c.shape, c.start + c.rows, 31);
  const Scored exact = RunOperation(c, sequence, &IndexerDefinition);
  const Scored naive = RunOperation(c, sequence, &IndexerNaive);
  const Scored got = RunOperation(c, sequence, variant.launch);
  if (c.shape.arithmetic == Arithmetic::kMath) {
    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    EXPECT_TRUE(testing::WithinBound(got.scores, naive.scores, exact.scores, bound));
  } else {
    EXPECT_TRUE(testing::Bf16FlipsWithin(got.scores, naive.scores, exact.scores));
  }
  // Where the scores are the same, so is the selection.
  if (Different(got.scores, exact.scores) == 0) {
    EXPECT_EQ(got.selected, exact.selected);
  }
  for (int64_t t = 0; t < c.rows; ++t) {
    const int64_t visible = VisibleKeys(c.start + t);
    const auto stride = static_cast<int64_t>(got.scores.size()) / c.rows;
    std::vector<uint64_t> keys(static_cast<size_t>(visible));
    std::vector<int32_t> want(static_cast<size_t>(c.shape.topk));
    SelectTopK(got.scores.data() + t * stride, visible, c.shape.topk, keys.data(), want.data());
    const auto* first = got.selected.data() + t * c.shape.topk;
    EXPECT_EQ(std::vector<int32_t>(first, first + c.shape.topk), want);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, IndexerBoundTest,
    ::testing::Combine(::testing::ValuesIn(testing::CpuVariants(IndexerVariants())),
                       ::testing::ValuesIn(kBoundCases)),
    [](const auto& test) { return std::get<1>(test.param).name; });

// ---- The same bits.

struct BitsCase {
  const char* name;
  Shape shape;
  int64_t tokens;
};
void PrintTo(const BitsCase& c, std::ostream* os) { *os << c.name; }

const BitsCase kBitsCases[] = {
    {"Math", {5, 20, 128, Arithmetic::kMath}, 701},
    {"Reference", {8, 20, 128, Arithmetic::kReference}, 701},
    {"SmallDim", {3, 7, 32, Arithmetic::kReference}, 301},
};

class IndexerBitsTest : public ::testing::TestWithParam<BitsCase> {
 protected:
  // Runs the whole sequence in chunks: `first` tokens, then `chunk` at a time. Without scores the
  // early rows are selected in another order, which is not what is compared here.
  static Scored Run(int64_t first, int64_t chunk, const Exec& exec) {
    const BitsCase& c = GetParam();
    Sequence sequence(c.shape, c.tokens, 41);
    const int64_t stride = c.tokens / kIndexRatio;
    Scored out;
    out.scores.resize(static_cast<size_t>(c.tokens * stride));
    out.selected.resize(static_cast<size_t>(c.tokens * c.shape.topk));
    for (int64_t begin = 0; begin < c.tokens;) {
      const int64_t end = std::min(c.tokens, begin + (begin == 0 ? first : chunk));
      IndexerArgs args = sequence.Args(begin, end, out.selected.data() + begin * c.shape.topk);
      args.scores = out.scores.data() + begin * stride;
      args.scores_stride = stride;
      const absl::Status status = Indexer(args, exec);
      EXPECT_TRUE(status.ok()) << status;
      begin = end;
    }
    return out;
  }
  static void ExpectSame(const Scored& got, const Scored& want, const std::string& what) {
    EXPECT_TRUE(SameBits(got.scores, want.scores)) << what;
    EXPECT_EQ(got.selected, want.selected) << what;
  }
};

TEST_P(IndexerBitsTest, DoNotDependOnTheChunks) {
  const Scored whole = Run(GetParam().tokens, 1, Exec{});
  for (int64_t chunk : {1, 3, 4, 5, 127, 128, 129}) {
    ExpectSame(Run(chunk, chunk, Exec{}), whole, "chunks of " + std::to_string(chunk));
  }
  ExpectSame(Run(333, 1, Exec{}), whole, "prefill of 333");
}

TEST_P(IndexerBitsTest, DoNotDependOnTheThreads) {
  const Scored one = Run(64, 64, Exec{});
  for (int threads : {2, 3}) {
    ThreadPool pool(threads);
    Workspace workspace;
    const Exec exec = {.threads = &pool, .workspace = &workspace};
    ExpectSame(Run(64, 64, exec), one, "threads");
    ExpectSame(Run(650, 1, exec), one, "threads, decode");
  }
}

TEST_P(IndexerBitsTest, DoNotDependOnTheSimdTarget) {
  const Scored best = Run(64, 64, Exec{});
  const int targets =
      testing::ForEachTarget([&] { ExpectSame(Run(64, 64, Exec{}), best, "another target"); });
  EXPECT_GE(targets, 1);
}

TEST_P(IndexerBitsTest, DoNotDependOnTheBatchOrOnLeavingScoresOut) {
  const BitsCase& c = GetParam();
  const Scored whole = Run(c.tokens, 1, Exec{});
  Sequence a(c.shape, c.tokens, 41);
  Sequence b(c.shape, c.tokens, 41);
  std::vector<int32_t> selected(whole.selected.size());
  IndexerArgs args = a.Args(0, c.tokens, selected.data());
  const int64_t split = c.tokens - 9;
  const SequenceKv views[] = {a.cache().View(0, split, 0), b.cache().View(split, 9, split)};
  args.sequences = views;
  ASSERT_TRUE(Indexer(args, Exec{}).ok());
  for (int64_t t = 0; t < c.tokens; ++t) {
    const auto at = static_cast<int64_t>(c.shape.topk) * t;
    std::vector<int32_t> got(selected.begin() + at, selected.begin() + at + c.shape.topk);
    std::vector<int32_t> want(whole.selected.begin() + at,
                              whole.selected.begin() + at + c.shape.topk);
    if (VisibleKeys(t) <= c.shape.topk) {  // All of them, in ascending order.
      EXPECT_TRUE(std::is_sorted(got.begin(), got.begin() + VisibleKeys(t)));
      std::sort(got.begin(), got.end());
      std::sort(want.begin(), want.end());
    }
    EXPECT_EQ(got, want) << "row " << t;
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, IndexerBitsTest, ::testing::ValuesIn(kBitsCases),
                         [](const auto& test) { return test.param.name; });

// Rows of long sequences are scored in several passes; the cut must not show.
TEST(IndexerTest, ScoresMoreRowsThanTheBufferHolds) {
  const Shape shape = {1, 4, 32, Arithmetic::kMath};
  const int64_t tokens = 100000;  // 25000 keys: 335 rows fill 32 MiB.
  const int64_t rows = 500;
  Sequence sequence(shape, tokens, 51);
  std::vector<int32_t> together(static_cast<size_t>(rows * 4));
  ASSERT_TRUE(Indexer(sequence.Args(tokens - rows, tokens, together.data()), Exec{}).ok());
  std::vector<int32_t> apart(together.size());
  for (int64_t t = 0; t < rows; t += 100) {
    const int64_t begin = tokens - rows + t;
    ASSERT_TRUE(Indexer(sequence.Args(begin, begin + 100, apart.data() + 4 * t), Exec{}).ok());
  }
  EXPECT_EQ(together, apart);
}

}  // namespace
}  // namespace isthmus::kernels
