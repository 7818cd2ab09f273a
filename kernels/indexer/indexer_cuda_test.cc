// SPDX-License-Identifier: Apache-2.0
// The CUDA variants of the indexer against the CPU: scores within their bound, selections equal as
// sets, padding and guards untouched, the same bits in every run.
#include <algorithm>
#include <cmath>
#include <limits>
#include <ostream>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif
#include "kernels/indexer/indexer_batch.h"
#include "kernels/indexer/indexer_steps.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const IndexerVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::IndexerBatch;
using kernels::testing::IndexerCase;
using kernels::testing::IndexerOutput;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<IndexerCase> Cases() {
  std::vector<IndexerCase> cases = {
      {.name = "OneRow", .parts = {{99, 1}}},
      {.name = "Mixed",
       .heads = 8,
       .topk = 20,
       .parts = {{1200, 1}, {2, 1}, {79, 1}, {83, 1}, {700, 1}, {0, 1}},
       .padding_rows = 2},
      {.name = "OddTopk", .heads = 5, .topk = 37, .parts = {{600, 2}, {147, 3}, {151, 3}}},
      // Just above a power of two beside a few tokens, and beyond what one block holds at once.
      {.name = "Long",
       .heads = 1,
       .topk = 512,
       .parts = {{5, 1}, {131075, 1}, {2051, 1}, {40, 1}},
       .padding_rows = 1},
      {.name = "Prefill",
       .heads = 16,
       .topk = 16,
       .parts = {{0, 70}, {0, 0}, {40, 33}},
       .padding_rows = 3},
      {.name = "SmallDim",
       .heads = 3,
       .topk = 7,
       .dim = 32,
       .arithmetic = Arithmetic::kReference,
       .parts = {{301, 2}}},
      {.name = "Fp8",
       .heads = 20,
       .topk = 21,
       .format = EntryFormat::kKeyFp8,
       .parts = {{1000, 1}, {3, 1}, {260, 1}},
       .padding_rows = 1},
      {.name = "Bf16",
       .heads = 7,
       .topk = 9,
       .format = EntryFormat::kKeyBf16,
       .parts = {{300, 5}, {520, 1}}},
      {.name = "Math",
       .heads = 5,
       .topk = 20,
       .arithmetic = Arithmetic::kMath,
       .format = EntryFormat::kKeyF32,
       .parts = {{500, 2}, {10, 1}},
       .padding_rows = 1},
  };
  if (testing::TestsRealShapes()) {
    for (const int64_t topk : {512, 1024, 2048, 777}) {
      cases.push_back({.name = "Flash",
                       .heads = 64,
                       .topk = topk,
                       .parts = {{9000, 1}, {100, 1}, {4095, 1}, {2047, 1}},
                       .padding_rows = 3});
    }
    cases.push_back({.name = "FlashLong",
                     .heads = 64,
                     .topk = 512,
                     .parts = {{131070, 1}, {33000, 1}, {10, 1}}});
    cases.push_back(
        {.name = "FlashPrefill", .heads = 64, .topk = 512, .parts = {{2000, 130}, {6000, 30}}});
  }
  return cases;
}

std::set<int32_t> SetOf(const IndexerOutput& out, int64_t row, int64_t topk) {
  const int32_t* first = out.selected.data() + row * topk;
  std::set<int32_t> set(first, first + topk);
  set.erase(-1);
  return set;
}

class IndexerCudaTest : public ::testing::TestWithParam<IndexerVariant> {
 protected:
  // False: the variant does not run here, or not this case.
  bool Able(const IndexerCase& c, IndexerBatch& batch) {
    if (!CanRunHere(GetParam(), device_.exec())) return false;
    if (GetParam().supports == nullptr) return true;
    IndexerArgs args;
    args.num_heads = c.heads;
    args.dim = c.dim;
    args.topk = c.topk;
    args.key_plane = batch.plane();
    args.arithmetic = c.arithmetic;
    return GetParam().supports(args);
  }
  IndexerOutput Run(IndexerBatch& batch, bool has_dump, int64_t max_tokens = 0) {
    return batch.RunOnDevice(GetParam().launch, has_dump, device_, device_.exec(), max_tokens);
  }
  // The selection is what SelectTopK makes of the scores beside it, and the set of a run without a
  // dump is the same and in ascending order.
  void ExpectSelections(const IndexerCase& c, IndexerBatch& batch, const IndexerOutput& dumped,
                        const IndexerOutput& plain) {
    for (int64_t t = 0; t < batch.rows(); ++t) {
      const int64_t visible = batch.visible(t);
      std::vector<uint64_t> keys(static_cast<size_t>(visible));
      std::vector<int32_t> want(static_cast<size_t>(c.topk));
      SelectTopK(dumped.scores.data() + t * batch.scores_stride(), visible, c.topk, keys.data(),
                 want.data());
      const int32_t* got = dumped.selected.data() + t * c.topk;
      EXPECT_EQ(std::vector<int32_t>(got, got + c.topk), want) << c.name << ", row " << t;
      std::sort(want.begin(), want.begin() + std::min(visible, c.topk));
      got = plain.selected.data() + t * c.topk;
      EXPECT_EQ(std::vector<int32_t>(got, got + c.topk), want) << c.name << ", row " << t;
    }
  }

  TestDevice device_;
};

TEST_P(IndexerCudaTest, StaysWithinItsBoundAndSelectsWhatItScored) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const IndexerCase& c : Cases()) {
    IndexerBatch batch(c, 31);
    if (!Able(c, batch)) continue;
    const IndexerOutput exact = batch.RunOnHost(IndexerDefinition, true);
    const IndexerOutput naive = batch.RunOnHost(IndexerNaive, true);
    const IndexerOutput host = batch.RunOnHost(Indexer, true);
    const IndexerOutput dumped = Run(batch, true);
    const IndexerOutput plain = Run(batch, false);
    const NumericBound bound =
        GetParam().patch != nullptr ? GetParam().patch->bound : NumericBound{};
    if (bound.numeric_class == NumericClass::kBitExact) {
      EXPECT_TRUE(SameBits(dumped.scores, host.scores)) << c.name;
    } else if (c.arithmetic == Arithmetic::kMath) {
      EXPECT_TRUE(
          testing::WithinBound(dumped.scores, naive.scores, exact.scores, GetParam().patch->bound))
          << c.name;
    } else {
      EXPECT_TRUE(testing::Bf16FlipsWithin(dumped.scores, naive.scores, exact.scores)) << c.name;
    }
    ExpectSelections(c, batch, dumped, plain);
    if (SameBits(dumped.scores, host.scores)) {
      EXPECT_EQ(dumped.selected, host.selected) << c.name;
    }
    if (c.heads == 1) continue;
    // Another run, under a bound that a captured graph may have been made with.
    const IndexerOutput again = Run(batch, true, 5000);
    EXPECT_TRUE(SameBits(again.scores, dumped.scores)) << c.name;
    EXPECT_EQ(again.selected, dumped.selected) << c.name;
    EXPECT_EQ(Run(batch, false, 5000).selected, plain.selected) << c.name;
  }
}

// The patches that stand in for steps, together, as a configuration switches them on.
TEST(IndexerCudaStepsTest, ScoresByMmaAndSelectsByRadix) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device(kPhaseDecode);
  const auto patches = PatchSet::Resolve(
      IndexerPatches(), {{"indexer.mma_scores", true}, {"indexer.radix_top_k", true}});
  ASSERT_TRUE(patches.ok()) << patches.status();
  Exec exec = device.exec();
  exec.patches = &*patches;
  for (const IndexerCase& c : Cases()) {
    if (c.arithmetic == Arithmetic::kMath) continue;  // Not on the bf16 grid.
    IndexerBatch batch(c, 17);
    const IndexerOutput host = batch.RunOnHost(Indexer, true);
    const IndexerOutput got = batch.RunOnDevice(Indexer, true, device, exec);
    const IndexerOutput plain = batch.RunOnDevice(Indexer, false, device, exec);
    EXPECT_TRUE(testing::Bf16FlipsWithin(got.scores, host.scores, host.scores)) << c.name;
    for (int64_t t = 0; t < batch.rows(); ++t) {
      EXPECT_EQ(SetOf(plain, t, c.topk), SetOf(got, t, c.topk)) << c.name << ", row " << t;
    }
  }
}

// The steps by themselves, as measurements call them, select what the operation does.
TEST(IndexerCudaStepsTest, AloneDoWhatTheOperationDoes) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto both = [](const IndexerArgs& args, const Exec& exec) -> absl::Status {
    const absl::Status scored = IndexerScores(args, exec);
    return scored.ok() ? IndexerSelection(args, exec) : scored;
  };
  TestDevice device(kPhaseDecode);
  for (const bool is_on : {false, true}) {
    const auto patches = PatchSet::Resolve(
        IndexerPatches(), {{"indexer.mma_scores", is_on}, {"indexer.radix_top_k", is_on}});
    ASSERT_TRUE(patches.ok()) << patches.status();
    Exec exec = device.exec();
    exec.patches = &*patches;
    for (const IndexerCase& c : Cases()) {
      if (c.arithmetic == Arithmetic::kMath) continue;
      IndexerBatch batch(c, 19);
      const IndexerOutput plain = batch.RunOnDevice(Indexer, false, device, exec);
      EXPECT_EQ(batch.RunOnDevice(both, true, device, exec).selected, plain.selected) << c.name;
    }
  }
  EXPECT_EQ(IndexerScores({}, device.exec()).code(), absl::StatusCode::kInvalidArgument);
}

// As in a pool of more than 2^32 bytes.
TEST_P(IndexerCudaTest, HasOffsetsOfMoreThan32Bits) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const EntryFormat format :
       {EntryFormat::kKeyFp4, EntryFormat::kKeyFp8, EntryFormat::kKeyBf16}) {
    const IndexerCase c = {.name = "Far",
                           .heads = 4,
                           .topk = 20,
                           .format = format,
                           .parts = {{1003, 1}, {303, 2}},
                           .padding_rows = 1};
    IndexerBatch batch(c, 7);
    if (!Able(c, batch)) continue;
    const auto far =
        batch.RunOnDevice(GetParam().launch, true, device_, device_.exec(), 0, testing::kFarShift);
    const IndexerOutput near = Run(batch, true);
    EXPECT_TRUE(SameBits(far.scores, near.scores));
    EXPECT_EQ(far.selected, near.selected);
  }
}

// Keys and queries that make scores of every kind: equal, zero, infinite, NaN.
TEST_P(IndexerCudaTest, OrdersTiesInfinitiesAndNaN) {
  ISTHMUS_REQUIRE_DEVICE();
  const int32_t infinite = 100;
  const int32_t nan = 200;
  for (const EntryFormat format :
       {EntryFormat::kKeyFp4, EntryFormat::kKeyFp8, EntryFormat::kKeyBf16}) {
    for (const int64_t topk : {30, 249, 250}) {
      const IndexerCase c = {.name = "Ties",
                             .heads = 2,
                             .topk = topk,
                             .format = format,
                             .parts = {{1003, 1}, {1003, 1}}};
      IndexerBatch batch(c, 5);
      if (!Able(c, batch)) continue;
      std::fill(batch.q.begin(), batch.q.end(), 0.0f);
      for (int64_t row = 0; row < 2; ++row) {
        batch.q[static_cast<size_t>(row * batch.q_stride())] = 1.0f;
        batch.q[static_cast<size_t>(row * batch.q_stride() + 128)] = 1.0f;
      }
      batch.w[0] = 1.0f;
      batch.w[1] = -2.0f;
      for (int32_t j = 0; j < 251; ++j) {
        std::vector<float> key(128, 0.0f);
        key[0] = static_cast<float>(j % 7) - 3.0f;
        if (j == nan) std::fill(key.begin(), key.end(), kNaN);
        if (j == infinite) key[0] = 2e38f;  // Twice that is infinite, and the least of all.
        batch.WriteKey(0, j, key.data());
        key[0] = 2.0f;  // The second row's scores are all equal but for the NaN.
        batch.WriteKey(1, j, key.data());
      }
      const IndexerOutput host = batch.RunOnHost(Indexer, false);
      const IndexerOutput got = Run(batch, false);
      for (int64_t t = 0; t < 2; ++t) {
        EXPECT_EQ(SetOf(got, t, topk), SetOf(host, t, topk)) << t << ", " << topk;
      }
      if (format == EntryFormat::kKeyFp4) continue;  // It has no NaN.
      EXPECT_EQ(SetOf(got, 0, topk).count(nan), 0u);
      EXPECT_EQ(SetOf(got, 0, topk).count(infinite), topk == 250 ? 1u : 0u);
    }
  }
}

TEST_P(IndexerCudaTest, SelectsWithoutScoresWhereEverythingFits) {
  ISTHMUS_REQUIRE_DEVICE();
  const IndexerCase c = {.name = "Fits", .heads = 2, .topk = 64, .parts = {{200, 3}, {1, 1}}};
  IndexerBatch batch(c, 5);
  if (!Able(c, batch)) GTEST_SKIP() << "not its shape";
  std::fill(batch.q.begin(), batch.q.end(), kNaN);  // Nobody looks.
  const IndexerOutput got = Run(batch, false);
  EXPECT_EQ(got.selected, batch.RunOnHost(Indexer, false).selected);
  EXPECT_EQ(Run(batch, false, 1024).selected, got.selected);
}

// Rows alone have the bits that they have in a batch.
TEST_P(IndexerCudaTest, DoesNotDependOnTheBatch) {
  ISTHMUS_REQUIRE_DEVICE();
  const IndexerCase both = {
      .name = "Both", .heads = 16, .topk = 33, .parts = {{900, 1}, {3000, 1}, {900, 1}}};
  IndexerBatch batch(both, 7);
  if (!Able(both, batch)) GTEST_SKIP() << "not its shape";
  const IndexerOutput together = Run(batch, true);
  IndexerCase one = both;
  one.parts = {{900, 1}};
  IndexerBatch alone(one, 7);
  const IndexerOutput single = Run(alone, true);
  EXPECT_TRUE(
      std::equal(single.selected.begin(), single.selected.end(), together.selected.begin()));
  for (int64_t j = 0; j < batch.visible(0); ++j) {
    EXPECT_EQ(single.scores[static_cast<size_t>(j)], together.scores[static_cast<size_t>(j)]);
  }
}

// One captured graph serves batches of other lengths, whose arrays take the place of the first's.
TEST_P(IndexerCudaTest, ReplaysAGraphForOtherLengths) {
  ISTHMUS_REQUIRE_DEVICE();
  IndexerCase c = {.name = "Short", .heads = 6, .topk = 24, .parts = {{50, 1}, {3, 1}, {200, 1}}};
  IndexerBatch first(c, 3);
  c.parts = {{1999, 1}, {90, 1}, {1300, 1}};
  IndexerBatch second(c, 4);
  c.parts = {{7, 1}, {1022, 1}};
  c.padding_rows = 1;
  IndexerBatch third(c, 5);
  if (!Able(c, first)) GTEST_SKIP() << "not its shape";
  DeviceCopy<float> q(first.q);
  DeviceCopy<float> w(first.w);
  const DeviceCopy<DeviceSequence> sequences(3);
  const DeviceCopy<int32_t> row_sequence(3);
  const DeviceCopy<int32_t> row_position(3);
  const DeviceCopy<int32_t> selected(3 * c.topk);
  const DeviceBatch batch = {.sequences = sequences.data(),
                             .row_sequence = row_sequence.data(),
                             .row_position = row_position.data(),
                             .rows = 3,
                             .num_sequences = 3,
                             .max_tokens = 4096};
  IndexerArgs args = first.Args(3, q.data(), w.data(), selected.data());
  args.device_batch = &batch;
  const auto load = [&](const IndexerBatch& b, const DeviceBatch& from) {
    q.Set(b.q);
    w.Set(b.w);
    const auto copy = [&](void* to, const void* source, size_t bytes) {
      ASSERT_TRUE(CopyOnDevice(to, source, static_cast<int64_t>(bytes), device_.stream()).ok());
    };
    copy(sequences.data(), from.sequences, 3 * sizeof(DeviceSequence));
    copy(row_sequence.data(), from.row_sequence, 3 * sizeof(int32_t));
    copy(row_position.data(), from.row_position, 3 * sizeof(int32_t));
  };
  const auto uploaded = first.Upload();
  load(first, uploaded.batch());
  ASSERT_TRUE(GetParam().launch(args, device_.exec()).ok());  // The workspace grows.
  ASSERT_TRUE(DeviceGraph::BeginCapture(device_.stream()).ok());
  EXPECT_TRUE(GetParam().launch(args, device_.exec()).ok());
  const auto graph = DeviceGraph::EndCapture(device_.stream());
  ASSERT_TRUE(graph.ok()) << graph.status();
  for (IndexerBatch* b : {&second, &third, &first}) {
    const auto now = b->Upload();
    load(*b, now.batch());
    ASSERT_TRUE(graph->Replay(device_.stream()).ok());
    device_.Finish();
    const IndexerOutput got = {.scores = {}, .selected = selected.ToHost()};
    const IndexerOutput want = b->RunOnHost(Indexer, false);
    for (int64_t t = 0; t < b->rows(); ++t) {
      EXPECT_EQ(SetOf(got, t, c.topk), SetOf(want, t, c.topk)) << t;
    }
  }
}

#if ISTHMUS_EMULATED
TEST_P(IndexerCudaTest, DoesNotDependOnTheOrderOfThreads) {
  const IndexerCase c = {.name = "Order",
                         .heads = 20,
                         .topk = 33,
                         .parts = {{900, 1}, {200, 4}, {700, 1}},
                         .padding_rows = 1};
  IndexerBatch batch(c, 7);
  if (!Able(c, batch)) GTEST_SKIP() << "not its shape";
  const IndexerOutput forward = Run(batch, true);
  const std::vector<int32_t> selected = Run(batch, false).selected;
  const emulator::ReverseOrder reversed;
  const IndexerOutput backward = Run(batch, true);
  EXPECT_TRUE(SameBits(forward.scores, backward.scores));
  EXPECT_EQ(forward.selected, backward.selected);
  EXPECT_EQ(Run(batch, false).selected, selected);
}
#endif

TEST_P(IndexerCudaTest, TakesNoRowsAndOnlyPadding) {
  ISTHMUS_REQUIRE_DEVICE();
  const IndexerCase none = {.name = "None"};
  IndexerBatch empty(none, 1);
  if (!Able(none, empty)) GTEST_SKIP() << "not its shape";
  EXPECT_TRUE(Run(empty, false).selected.empty());
  const IndexerCase padding = {.name = "Padding", .padding_rows = 5};
  IndexerBatch batch(padding, 1);
  Run(batch, false, 4096);
  Run(batch, true, 4096);
}

INSTANTIATE_TEST_SUITE_P(Table, IndexerCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(IndexerVariants())),
                         kernels::testing::VariantName<IndexerVariant>);

TEST(IndexQueryCudaTest, HasTheBitsOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  for (const int64_t dim : {1, 2, 16, 32, 128, 256}) {
    for (const int64_t heads : {1, 3, 64}) {
      const int64_t stride = heads * dim + 4;
      std::vector<float> q = testing::OutlierValues(static_cast<uint64_t>(dim), 3 * stride);
      q[1] = 0.0f;
      if (dim >= 32) std::fill_n(q.begin() + stride, 32, 0.0f);
      const DeviceCopy<float> device_q(q);
      const auto view = [&](float* data) {
        return MatrixView{data, DType::kF32, 3, heads * dim, stride};
      };
      ASSERT_TRUE(IndexQuery(view(q.data()), heads, dim, Arithmetic::kReference, Exec{}).ok());
      ASSERT_TRUE(
          IndexQuery(view(device_q.data()), heads, dim, Arithmetic::kReference, device.exec())
              .ok());
      device.Finish();
      EXPECT_TRUE(SameBits(device_q.ToHost(), q)) << dim << ", " << heads;
      EXPECT_TRUE(device_q.Intact());
    }
  }
}

TEST(IndexerCudaRefusalTest, RefusesABatchThatDoesNotFit) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  std::vector<float> values(128);
  std::vector<int32_t> selected(8);
  DeviceBatch batch;
  batch.rows = 2;
  IndexerArgs args;
  args.q = F32Matrix(values.data(), 1, 128);
  args.w = F32Matrix(values.data(), 1, 1);
  args.num_heads = 1;
  args.topk = 8;
  args.key_plane = {EntryFormat::kKeyFp4, 0, 4096, 64, 4, 64};
  args.selected = selected.data();
  args.device_batch = &batch;
  absl::Status status = Indexer(args, device.exec());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("device_batch has 2 rows, q has 1"), std::string::npos) << status;
  batch.rows = 1;
  batch.max_tokens = 800;
  args.scores = values.data();
  args.scores_stride = 199;
  status = Indexer(args, device.exec());
  EXPECT_NE(status.message().find("a sequence may have 200 entries"), std::string::npos) << status;
  args.device_batch = nullptr;
  args.q.rows = args.w.rows = 0;
  status = Indexer(args, device.exec());
  EXPECT_NE(status.message().find("device_batch null"), std::string::npos) << status;
}

}  // namespace
}  // namespace isthmus::kernels
