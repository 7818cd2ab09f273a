// SPDX-License-Identifier: Apache-2.0
// The indexer: values by hand, the order of a selection, refusals and golden vectors.
#include "kernels/indexer/indexer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/hadamard.h"
#include "kernels/core/quantise.h"
#include "kernels/indexer/indexer_sequence.h"
#include "kernels/indexer/indexer_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"

namespace isthmus::kernels {
namespace {

using testing::SameBits;
using Sequence = testing::IndexerSequence;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// ---- By hand: two heads, keys with one channel set.

class IndexerByHandTest
    : public ::testing::TestWithParam<absl::Status (*)(const IndexerArgs&, const Exec&)> {
 protected:
  // 12 tokens; keys (1, 0, ..), (2, 0, ..), (-3, 0, ..).
  IndexerByHandTest() : sequence_({.heads = 2, .topk = 2}, 12, 1) {
    std::fill(sequence_.q.begin(), sequence_.q.end(), 0.0f);
    for (int64_t j = 0; j < 3; ++j) {
      std::vector<float> key(128, 0.0f);
      key[0] = j == 2 ? -3.0f : static_cast<float>(j + 1);
      sequence_.WriteKey(j, key.data());
    }
    // The last row: head 0 is 10 and weighs 1, head 1 is -1 and weighs -100.
    sequence_.q[11 * 256] = 10.0f;
    sequence_.q[11 * 256 + 128] = -1.0f;
    sequence_.w[22] = 1.0f;
    sequence_.w[23] = -100.0f;
  }
  Sequence sequence_;
};

TEST_P(IndexerByHandTest, WeighsAfterTheRelu) {
  std::vector<int32_t> selected(12 * 2);
  std::vector<float> scores(12 * 4);
  IndexerArgs args = sequence_.Args(0, 12, selected.data());
  args.scores = scores.data();
  args.scores_stride = 4;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_EQ(scores[44], 10.0f);
  EXPECT_EQ(scores[45], 20.0f);
  EXPECT_EQ(scores[46], -300.0f);  // Head 0 is cut at 0, head 1 gives 3 * -100.
  EXPECT_EQ(scores[47], -kInfinity);
  EXPECT_EQ(selected[22], 1);
  EXPECT_EQ(selected[23], 0);
}

TEST_P(IndexerByHandTest, PadsRowsThatSeeFewEntries) {
  std::vector<int32_t> selected(12 * 2, 99);
  std::vector<float> scores(12 * 4);
  IndexerArgs args = sequence_.Args(0, 12, selected.data());
  args.scores = scores.data();
  args.scores_stride = 4;
  ASSERT_TRUE(GetParam()(args, Exec{}).ok());
  EXPECT_EQ(std::vector<int32_t>(selected.begin(), selected.begin() + 10),
            (std::vector<int32_t>{-1, -1, -1, -1, -1, -1, 0, -1, 0, -1}));
  EXPECT_EQ(scores[8], -kInfinity);  // Position 2 sees none, position 3 one.
  EXPECT_NE(scores[12], -kInfinity);
  EXPECT_EQ(scores[13], -kInfinity);
}

INSTANTIATE_TEST_SUITE_P(All, IndexerByHandTest,
                         ::testing::Values(&Indexer, &IndexerDefinition, &IndexerNaive));

TEST(IndexerTest, RoundsTheScoreThreeTimesInReferenceArithmetic) {
  Sequence sequence({.heads = 2, .topk = 1, .arithmetic = Arithmetic::kReference}, 8, 1);
  std::fill(sequence.q.begin(), sequence.q.end(), 0.0f);
  std::vector<float> key(128, 0.0f);
  key[0] = 1.0f;
  key[32] = 1.0f;
  sequence.WriteKey(0, key.data());
  sequence.WriteKey(1, key.data());
  float* q = sequence.q.data() + 7 * 256;
  q[0] = 1.0f;
  q[32] = 0x1p-8f;   // The dot product 1 + 2^-8 is a tie and becomes 1.
  q[128] = 0x1p-8f;  // Head 1: 2^-8 * 1.5, added to 1.5 * 1.
  sequence.w[14] = 1.5f;
  sequence.w[15] = 1.5f;
  std::vector<int32_t> selected(1);
  std::vector<float> scores(2);
  IndexerArgs args = sequence.Args(7, 8, selected.data());
  args.scores = scores.data();
  args.scores_stride = 2;
  ASSERT_TRUE(Indexer(args, Exec{}).ok());
  EXPECT_EQ(scores[0], 1.5078125f);  // 1.5 + 0.005859375, to the bf16 grid of 2^-7.
  EXPECT_EQ(selected[0], 0);         // A tie: the smaller index.
}

TEST(IndexerTest, SelectsEverythingInAscendingOrderWithoutScores) {
  Sequence sequence({.heads = 2, .topk = 4}, 12, 1);
  std::vector<int32_t> selected(12 * 4);
  ASSERT_TRUE(Indexer(sequence.Args(0, 12, selected.data()), Exec{}).ok());
  EXPECT_EQ(std::vector<int32_t>(selected.end() - 4, selected.end()),
            (std::vector<int32_t>{0, 1, 2, -1}));
}

// ---- The order of a selection.

std::vector<int32_t> TopK(const std::vector<float>& scores, int64_t topk) {
  std::vector<uint64_t> keys(scores.size());
  std::vector<int32_t> selected(static_cast<size_t>(topk));
  SelectTopK(scores.data(), static_cast<int64_t>(scores.size()), topk, keys.data(),
             selected.data());
  return selected;
}

TEST(SelectTopKTest, OrdersByScoreThenIndexWithNanLast) {
  EXPECT_EQ(TopK({kNaN, 1.0f, -kInfinity, 3.0f, 1.0f, kInfinity, -2.0f}, 7),
            (std::vector<int32_t>{5, 3, 1, 4, 6, 2, 0}));
}
TEST(SelectTopKTest, TakesBothZerosForEqual) {
  EXPECT_EQ(TopK({-0.0f, 0.0f, -0.0f, -1.0f}, 3), (std::vector<int32_t>{0, 1, 2}));
}
TEST(SelectTopKTest, CutsTiesAtTheSmallerIndex) {
  EXPECT_EQ(TopK({1.0f, 2.0f, 1.0f, 1.0f, 2.0f}, 3), (std::vector<int32_t>{1, 4, 0}));
}
TEST(SelectTopKTest, PadsWithMinusOne) {
  EXPECT_EQ(TopK({1.0f, 2.0f}, 4), (std::vector<int32_t>{1, 0, -1, -1}));
  EXPECT_EQ(TopK({}, 2), (std::vector<int32_t>{-1, -1}));
}
TEST(SelectTopKTest, AgreesWithASortOfManyTiedScores) {
  testing::Random random(5);
  for (int64_t n : {1, 63, 511, 512, 513, 3000}) {
    std::vector<float> scores(static_cast<size_t>(n));
    for (float& score : scores) score = static_cast<float>(random.Below(40)) - 20.0f;
    std::vector<int32_t> order(scores.size());
    for (size_t j = 0; j < order.size(); ++j) order[j] = static_cast<int32_t>(j);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    order.resize(512, -1);
    EXPECT_EQ(TopK(scores, 512), order) << n << " scores";
  }
}

// ---- Refusals.

class IndexerRefusalTest : public ::testing::Test {
 protected:
  IndexerRefusalTest() : sequence_({.heads = 2, .topk = 2}, 8, 7), selected_(16), scores_(16) {
    args_ = sequence_.Args(0, 8, selected_.data());
  }
  void ExpectRefused(const char* part) {
    const absl::Status status = Indexer(args_, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_NE(status.message().find(part), std::string::npos) << status;
  }

  Sequence sequence_;
  std::vector<int32_t> selected_;
  std::vector<float> scores_;
  IndexerArgs args_;
};

TEST_F(IndexerRefusalTest, AcceptsTheArgumentsThatTheOthersSpoil) {
  EXPECT_TRUE(Indexer(args_, Exec{}).ok());
}
TEST_F(IndexerRefusalTest, RefusesATopkBelowOne) {
  args_.topk = 0;
  ExpectRefused("topk is 0");
}
TEST_F(IndexerRefusalTest, RefusesANullSelection) {
  args_.selected = nullptr;
  ExpectRefused("`selected` null");
}
TEST_F(IndexerRefusalTest, RefusesWeightsOfAnotherShape) {
  args_.w.cols = 3;
  ExpectRefused("indexer: w is [8, 3]");
}
TEST_F(IndexerRefusalTest, RefusesAQueryOfAnotherShape) {
  args_.q.cols = 128;
  ExpectRefused("indexer: q is [8, 128]");
}
TEST_F(IndexerRefusalTest, RefusesKeysOfAnotherWidth) {
  args_.key_plane.data_bytes = 64;
  ExpectRefused("64 bytes per key");
}
TEST_F(IndexerRefusalTest, RefusesAScoresStrideBelowTheEntries) {
  args_.scores = scores_.data();
  args_.scores_stride = 1;
  ExpectRefused("scores_stride is 1, the sequence at row 0 has 2");
}
TEST_F(IndexerRefusalTest, RefusesASequenceWithoutPages) {
  SequenceKv view = args_.sequences[0];
  view.pages[kIndexKey] = {};
  args_.sequences = {&view, 1};
  ExpectRefused("pages for 0 entries, needs 2");
}
TEST_F(IndexerRefusalTest, RefusesAnotherArchitecture) {
  EXPECT_EQ(Indexer(args_, Exec{.arch = 1}).code(), absl::StatusCode::kUnimplemented);
}
TEST(IndexQueryTest, RefusesADimThatIsNoPowerOfTwo) {
  std::vector<float> q(96);
  EXPECT_EQ(IndexQuery(F32Matrix(q.data(), 1, 96), 1, 96, Arithmetic::kReference, Exec{}).code(),
            absl::StatusCode::kInvalidArgument);
}

// ---- The transform and the query.

TEST(HadamardTest, TransformsFourValuesByHand) {
  std::vector<float> x = {1.0f, 2.0f, 3.0f, 5.0f};
  Hadamard(x.data(), 4);
  EXPECT_EQ(x, (std::vector<float>{5.5f, -1.5f, -2.5f, 0.5f}));
}

TEST(HadamardTest, VectorsGiveTheBitsOfTheScalarButterflies) {
  for (int64_t n : {16, 32, 128, 512}) {
    std::vector<float> want = testing::NormalValues(3, n);
    std::vector<float> got = want;
    HadamardButterflies(want.data(), n);
    for (float& value : want) value *= 1.0f / std::sqrt(static_cast<float>(n));
    Hadamard(got.data(), n);
    EXPECT_TRUE(SameBits(got, want)) << n;
  }
}

TEST(HadamardTest, MatchesTheGoldenVector) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_hadamard.safetensors");
  const auto dims = file.dims();  // rows, n
  auto x = file.at("x").F32();
  for (int64_t r = 0; r < dims[0]; ++r) Hadamard(x.data() + r * dims[1], dims[1]);
  EXPECT_TRUE(testing::WithinRelativeL2(x, file.at("y").F32(), 1e-5));
}

TEST(IndexQueryTest, RoundsAfterTheTransformAndAfterTheRoundTrip) {
  std::vector<float> q = testing::NormalValues(9, 2 * 256);
  std::vector<float> want = q;
  for (int64_t i = 0; i < 4; ++i) {
    float* x = want.data() + i * 128;
    Hadamard(x, 128);
    RoundBf16Row(x, 128, x);
    RoundTripFp4Row(x, 128, x);
  }
  const std::vector<float> plain = q;
  ASSERT_TRUE(IndexQuery(F32Matrix(q.data(), 2, 256), 2, 128, Arithmetic::kMath, Exec{}).ok());
  EXPECT_TRUE(SameBits(q, plain));
  ASSERT_TRUE(IndexQuery(F32Matrix(q.data(), 2, 256), 2, 128, Arithmetic::kReference, Exec{}).ok());
  EXPECT_TRUE(SameBits(q, want));
}

TEST(IndexerTest, MatchesTheGoldenVector) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_index_score.safetensors");
  const auto dims = file.dims();  // rows, heads, dim, keys
  const int64_t rows = dims[0], heads = dims[1], n = dims[3];
  ASSERT_EQ(dims[2], 128);
  Sequence sequence({.heads = heads, .topk = 3}, 100, 1);
  auto keys = file.at("kv").F32();
  for (int64_t j = 0; j < n; ++j) sequence.WriteKey(j, keys.data() + j * 128);
  const auto q = file.at("q").F32();
  const auto w = file.at("weights").F32();
  std::copy(q.begin(), q.end(), sequence.q.end() - rows * heads * 128);
  std::copy(w.begin(), w.end(), sequence.w.end() - rows * heads);
  std::vector<int32_t> selected(static_cast<size_t>(rows * 3));
  std::vector<float> scores(static_cast<size_t>(rows * 25));
  IndexerArgs args = sequence.Args(100 - rows, 100, selected.data());
  args.scores = scores.data();
  args.scores_stride = 25;
  ASSERT_TRUE(Indexer(args, Exec{}).ok());
  std::vector<float> got;
  for (int64_t t = 0; t < rows; ++t) {
    got.insert(got.end(), scores.begin() + t * 25, scores.begin() + t * 25 + n);
  }
  EXPECT_TRUE(testing::WithinRelativeL2(got, file.at("score").F32(), 1e-5));
}

}  // namespace
}  // namespace isthmus::kernels
