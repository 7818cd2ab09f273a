// SPDX-License-Identifier: Apache-2.0
// The parts of all ranks put together are the whole: bytes, values, and what linears and experts
// compute from them.
#include "services/model/sharded_weights.h"

#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/core/gemm.h"
#include "kernels/experts/experts.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "services/model/testing/checkpoint_files.h"
#include "services/model/weight_slice.h"

namespace isthmus::model {
namespace {

using kernels::F32Matrix;
using kernels::WeightFormat;
using kernels::WeightView;

// A slice in memory of its own.
struct OwnedSlice {
  OwnedSlice(const WeightView& w, const Range& rows, const Range& cols)
      : elements(static_cast<size_t>(SliceElementBytes(w, rows, cols)) + 64),
        scales(static_cast<size_t>(SliceScaleBytes(w, rows, cols)) + 64, 0xcc),
        view(CopySlice(w, rows, cols, elements.data(), scales.data())) {}

  std::vector<uint8_t> elements;
  std::vector<uint8_t> scales;
  WeightView view;
};

// Every value of `part` is the one of `whole` at that offset, bit for bit.
void ExpectPart(const std::string& name, const WeightView& part, const WeightView& whole,
                int64_t first_row, int64_t first_col) {
  for (int64_t n = 0; n < part.rows; ++n) {
    for (int64_t k = 0; k < part.cols; ++k) {
      const double found = kernels::WeightValue(part, n, k);
      const double wanted = kernels::WeightValue(whole, first_row + n, first_col + k);
      if (std::memcmp(&found, &wanted, sizeof(found)) != 0) {
        FAIL() << name << " [" << n << ", " << k << "]: found " << found << ", wanted " << wanted;
      }
    }
  }
}

TEST(WeightSliceTest, KeepsValuesAndScalesWhereverItIsCut) {
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
        WeightFormat::kNvfp4}) {
    const kernels::testing::OwnedWeight w = kernels::testing::RandomWeight(71, format, 200, 576);
    for (const Range rows : {Range{0, 200}, Range{0, 64}, Range{121, 30}, Range{190, 10}}) {
      for (const Range cols : {Range{0, 576}, Range{0, 96}, Range{96, 96}, Range{224, 352}}) {
        const OwnedSlice slice(w.view, rows, cols);
        const std::string name = absl::StrCat("format ", static_cast<int>(format));
        ExpectPart(name, slice.view, w.view, rows.first, cols.first);
        // A slice of a slice is a slice.
        const OwnedSlice inner(slice.view, {3, 5}, {32, 64});
        ExpectPart(name, inner.view, w.view, rows.first + 3, cols.first + 32);
        // Nothing behind the announced bytes was written.
        for (size_t i = slice.scales.size() - 64; i < slice.scales.size(); ++i) {
          ASSERT_EQ(slice.scales[i], 0xcc) << name;
        }
      }
    }
  }
}

TEST(WeightSliceTest, GathersToTheBytesOfTheWhole) {
  for (const WeightFormat format :
       {WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kNvfp4}) {
    const int64_t row_bytes = format == WeightFormat::kBf16    ? 512
                              : format == WeightFormat::kNvfp4 ? 128
                                                               : 256;
    const kernels::testing::OwnedWeight w = kernels::testing::RandomWeight(72, format, 96, 256);
    for (const int ranks : {1, 2, 4, 8}) {
      std::vector<uint8_t> gathered(static_cast<size_t>(96 * row_bytes));
      const int64_t part_bytes = row_bytes / ranks;
      for (int rank = 0; rank < ranks; ++rank) {
        const OwnedSlice part(w.view, {0, 96}, {256 / ranks * rank, 256 / ranks});
        for (int64_t n = 0; n < 96; ++n) {
          std::memcpy(gathered.data() + n * row_bytes + rank * part_bytes,
                      part.elements.data() + n * part_bytes, static_cast<size_t>(part_bytes));
        }
      }
      EXPECT_EQ(std::memcmp(gathered.data(), w.view.elements, gathered.size()), 0) << ranks;
    }
  }
}

class ShardedWeightsTest : public testing::Test {
 protected:
  static std::unique_ptr<Weights> Load(const std::string& dir, WeightOptions::Residency residency) {
    WeightOptions options;
    options.residency = residency;
    absl::StatusOr<std::unique_ptr<Weights>> weights = Weights::Load(dir, options);
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }
  static std::unique_ptr<ShardedWeights> Shard(const Weights& whole, int rank, int ranks) {
    absl::StatusOr<std::unique_ptr<ShardedWeights>> shard =
        ShardedWeights::Create(&whole, *PlanShard(whole.config(), rank, ranks));
    EXPECT_TRUE(shard.ok()) << shard.status();
    return *std::move(shard);
  }
  static std::string Golden(const std::string& name) {
    return absl::StrCat(ISTHMUS_SOURCE_DIR, "/tests/golden/", name);
  }
};

void ExpectExpert(const std::string& name, const kernels::ExpertWeights& part,
                  const kernels::ExpertWeights& whole, const Range& inner) {
  EXPECT_EQ(part.w1.rows, inner.count);
  EXPECT_EQ(part.w2.cols, inner.count);
  ExpectPart(name + ".w1", part.w1, whole.w1, inner.first, 0);
  ExpectPart(name + ".w3", part.w3, whole.w3, inner.first, 0);
  ExpectPart(name + ".w2", part.w2, whole.w2, 0, inner.first);
}

void ExpectLayer(const LayerWeights& part, const LayerWeights& whole, const ShardPlan& plan) {
  ASSERT_EQ(part.attn_sink.size, plan.heads.count);
  EXPECT_EQ(std::memcmp(part.attn_sink.f32(), whole.attn_sink.f32() + plan.heads.first,
                        4 * static_cast<size_t>(plan.heads.count)),
            0);
  EXPECT_EQ(part.wq_b.rows, plan.query_rows.count);
  ExpectPart("wq_b", part.wq_b, whole.wq_b, plan.query_rows.first, 0);
  ASSERT_EQ(part.wo_a.size(), static_cast<size_t>(plan.groups.count));
  for (size_t g = 0; g < part.wo_a.size(); ++g) {
    ExpectPart("wo_a", part.wo_a[g], whole.wo_a[static_cast<size_t>(plan.groups.first) + g], 0, 0);
  }
  EXPECT_EQ(part.wo_b.cols, plan.output_columns.count);
  ExpectPart("wo_b", part.wo_b, whole.wo_b, 0, plan.output_columns.first);
  for (size_t e = 0; e < whole.experts.size(); ++e) {
    ExpectExpert(absl::StrCat("expert ", e), part.experts[e], whole.experts[e], plan.intermediate);
  }
  ExpectExpert("shared", part.shared, whole.shared, plan.intermediate);
  EXPECT_EQ(part.wkv.elements, whole.wkv.elements);  // Replicated: no copy.
  EXPECT_EQ(part.gate.elements, whole.gate.elements);
}

TEST_F(ShardedWeightsTest, HasTheValuesOfTheWholeInTheSmallCheckpoints) {
  for (const char* name :
       {"tiny-recall", "tiny-random-3layer/mxfp4", "tiny-random-3layer/nvfp4-cast"}) {
    SCOPED_TRACE(name);
    const std::unique_ptr<Weights> whole = Load(Golden(name), WeightOptions::kMapped);
    for (const auto& [rank, ranks] : {std::pair{0, 1}, {0, 2}, {1, 2}}) {
      const std::unique_ptr<ShardedWeights> shard = Shard(*whole, rank, ranks);
      for (int i = 0; i < whole->config().num_hidden_layers; ++i) {
        ExpectLayer(shard->layer(i), whole->layer(i), shard->plan());
      }
      ExpectPart("head", shard->head(), whole->head(), shard->plan().vocabulary.first, 0);
      EXPECT_EQ(shard->head().rows, whole->config().vocab_size / ranks);
    }
  }
}

TEST_F(ShardedWeightsTest, HasTheValuesOfTheWholeInEveryExpertFormat) {
  for (const WeightFormat format :
       {WeightFormat::kMxfp4, WeightFormat::kNvfp4, WeightFormat::kFp8Block128}) {
    const TemporaryFolder folder;
    MiniatureCheckpoint(format).Write(folder.path());
    const std::unique_ptr<Weights> whole = Load(folder.path(), WeightOptions::kMapped);
    for (const int rank : {0, 1}) {
      const std::unique_ptr<ShardedWeights> shard = Shard(*whole, rank, 2);
      for (int i = 0; i < whole->config().num_hidden_layers; ++i) {
        ExpectLayer(shard->layer(i), whole->layer(i), shard->plan());
      }
    }
  }
}

TEST_F(ShardedWeightsTest, RefusesWeightsThatArePacked) {
  const std::unique_ptr<Weights> whole = Load(Golden("tiny-recall"), WeightOptions::kPacked);
  const auto shard = ShardedWeights::Create(whole.get(), *PlanShard(whole->config(), 0, 2));
  EXPECT_EQ(shard.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(shard.status().message()), testing::HasSubstr("layout 1, expected 0"));
}

// Outputs that are cut by rows are the whole's, bit for bit; partial sums add up to it.
TEST_F(ShardedWeightsTest, LinearsOfTheRanksAddUpToTheWhole) {
  const std::unique_ptr<Weights> whole = Load(Golden("tiny-recall"), WeightOptions::kMapped);
  const ModelConfig& config = whole->config();
  constexpr int64_t kTokens = 5;
  const LayerWeights& layer = whole->layer(2);
  std::vector<float> latent = kernels::testing::NormalValues(1, kTokens * config.q_lora_rank);
  const int64_t width = int64_t{config.o_groups} * config.o_lora_rank;
  std::vector<float> z = kernels::testing::NormalValues(2, kTokens * width);
  std::vector<float> q(static_cast<size_t>(kTokens * layer.wq_b.rows));
  std::vector<float> y(static_cast<size_t>(kTokens * config.hidden_size));
  const auto latent_view = F32Matrix(latent.data(), kTokens, config.q_lora_rank);
  const auto z_view = F32Matrix(z.data(), kTokens, width);
  const auto q_view = F32Matrix(q.data(), kTokens, layer.wq_b.rows);
  ASSERT_TRUE(kernels::Linear({.x = latent_view, .weight = layer.wq_b, .out = q_view}, {}).ok());
  ASSERT_TRUE(kernels::Linear({.x = z_view,
                               .weight = layer.wo_b,
                               .out = F32Matrix(y.data(), kTokens, config.hidden_size)},
                              {})
                  .ok());

  std::vector<float> gathered(q.size(), -1.0f);
  std::vector<float> sum(y.size(), 0.0f);
  const auto gathered_view = F32Matrix(gathered.data(), kTokens, layer.wq_b.rows);
  for (const int rank : {0, 1}) {
    const std::unique_ptr<ShardedWeights> shard = Shard(*whole, rank, 2);
    const ShardPlan& plan = shard->plan();
    const LayerWeights& part = shard->layer(2);
    ASSERT_TRUE(kernels::Linear(
                    {.x = latent_view,
                     .weight = part.wq_b,
                     .out = gathered_view.Columns(plan.query_rows.first, plan.query_rows.count)},
                    {})
                    .ok());
    std::vector<float> partial(y.size());
    ASSERT_TRUE(
        kernels::Linear({.x = z_view.Columns(plan.output_columns.first, plan.output_columns.count),
                         .weight = part.wo_b,
                         .out = F32Matrix(partial.data(), kTokens, config.hidden_size)},
                        {})
            .ok());
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
  }
  EXPECT_TRUE(kernels::testing::SameBits(gathered, q));
  EXPECT_TRUE(kernels::testing::WithinRelativeL2(sum, y, 1e-6));
}

TEST_F(ShardedWeightsTest, ExpertsOfTheRanksAddUpToTheWhole) {
  constexpr int64_t kTokens = 7;
  for (const WeightFormat format :
       {WeightFormat::kMxfp4, WeightFormat::kNvfp4, WeightFormat::kFp8Block128}) {
    const TemporaryFolder folder;
    MiniatureCheckpoint(format).Write(folder.path());
    const std::unique_ptr<Weights> whole = Load(folder.path(), WeightOptions::kMapped);
    const int64_t hidden = whole->config().hidden_size;
    std::vector<float> x = kernels::testing::NormalValues(3, kTokens * hidden);
    std::vector<int32_t> ids;
    std::vector<float> weights;
    for (int32_t t = 0; t < kTokens; ++t) {
      ids.insert(ids.end(), {t % 4, (t + 1 + t / 4) % 4});
      weights.insert(weights.end(), {0.5f, 0.75f});
    }
    const auto run = [&](const LayerWeights& layer) {
      std::vector<float> out(x.size());
      const absl::Status status = kernels::Experts({.x = F32Matrix(x.data(), kTokens, hidden),
                                                    .ids = ids.data(),
                                                    .weights = weights.data(),
                                                    .k = 2,
                                                    .experts = layer.experts,
                                                    .shared = &layer.shared,
                                                    .out = F32Matrix(out.data(), kTokens, hidden),
                                                    .routed = {},
                                                    .arithmetic = kernels::Arithmetic::kMath},
                                                   {});
      EXPECT_TRUE(status.ok()) << status;
      return out;
    };
    const std::vector<float> expected = run(whole->layer(1));
    std::vector<float> sum(x.size(), 0.0f);
    for (const int rank : {0, 1}) {
      const std::vector<float> partial = run(Shard(*whole, rank, 2)->layer(1));
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += partial[i];
    }
    EXPECT_TRUE(kernels::testing::WithinRelativeL2(sum, expected, 1e-6))
        << static_cast<int>(format);
  }
}

}  // namespace
}  // namespace isthmus::model
