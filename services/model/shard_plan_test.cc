// SPDX-License-Identifier: Apache-2.0
#include "services/model/shard_plan.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr WeightFormat kExpertFormats[] = {WeightFormat::kMxfp4, WeightFormat::kNvfp4,
                                           WeightFormat::kFp8Block128};

// The shapes of V4-Flash, with one layer of each kind and fewer experts: all are alike.
ModelConfig FlashConfig() {
  ModelConfig c;
  c.vocab_size = 129280;
  c.hidden_size = 4096;
  c.num_hidden_layers = 4;
  c.num_attention_heads = 64;
  c.q_lora_rank = 1024;
  c.o_groups = 8;
  c.o_lora_rank = 1024;
  c.compress_ratios = {0, 0, 4, 128, 0};
  c.n_routed_experts = 16;
  c.num_experts_per_tok = 6;
  c.moe_intermediate_size = 2048;
  c.num_hash_layers = 1;
  c.num_nextn_predict_layers = 1;
  return c;
}

ModelConfig Golden(const std::string& name) {
  absl::StatusOr<ModelConfig> config =
      LoadModelConfig(absl::StrCat(ISTHMUS_SOURCE_DIR, "/tests/golden/", name));
  EXPECT_TRUE(config.ok()) << config.status();
  return *config;
}

std::vector<PlannedTensor> Tensors(const ModelConfig& config, WeightFormat experts) {
  return PlanTensors(config, {.num_stages = 1}, [&](const std::string&) { return experts; });
}

std::vector<ShardPlan> Plans(const ModelConfig& config, int ranks) {
  std::vector<ShardPlan> plans;
  for (int rank = 0; rank < ranks; ++rank) {
    absl::StatusOr<ShardPlan> plan = PlanShard(config, rank, ranks);
    EXPECT_TRUE(plan.ok()) << plan.status();
    if (plan.ok()) plans.push_back(*plan);
  }
  return plans;
}

TensorShard Find(const ModelConfig& config, const ShardPlan& plan, WeightFormat experts,
                 const std::string& name) {
  for (const PlannedTensor& tensor : Tensors(config, experts)) {
    if (tensor.name == name) return ShardOf(config, plan, tensor);
  }
  ADD_FAILURE() << name << " is not planned";
  return {};
}

// One axis of a tensor that has `size` units: every unit has an owner, and exactly one unless a cut
// lies inside it.
void ExpectCovers(const std::string& name, const std::vector<Range>& parts,
                  const std::vector<int64_t>& offsets, int64_t size) {
  EXPECT_EQ(parts.front().first, 0) << name;
  EXPECT_EQ(parts.back().end(), size) << name;
  for (size_t r = 0; r < parts.size(); ++r) {
    EXPECT_GT(parts[r].count, 0) << name;
    if (r == 0) continue;
    const int64_t shared = offsets[r] == 0 ? 0 : 1;
    EXPECT_EQ(parts[r].first, parts[r - 1].end() - shared) << name << " of rank " << r;
  }
}

void ExpectEveryUnitOwned(const ModelConfig& config, int ranks, WeightFormat experts) {
  const std::vector<ShardPlan> plans = Plans(config, ranks);
  ASSERT_EQ(plans.size(), static_cast<size_t>(ranks));
  for (const PlannedTensor& tensor : Tensors(config, experts)) {
    const int64_t rows = tensor.shape.empty() ? 1 : tensor.shape[0];
    const int64_t cols = tensor.shape.size() < 2 ? 1 : tensor.shape[1];
    std::vector<Range> row_parts, col_parts;
    std::vector<int64_t> row_offsets, col_offsets;
    const TensorShard::Axis axis = ShardOf(config, plans[0], tensor).axis;
    for (const ShardPlan& plan : plans) {
      const TensorShard shard = ShardOf(config, plan, tensor);
      EXPECT_EQ(shard.axis, axis) << tensor.name;
      if (axis != TensorShard::kRows) {
        EXPECT_EQ(shard.rows, (Range{0, rows})) << tensor.name;
      }
      if (axis != TensorShard::kColumns) {
        EXPECT_EQ(shard.cols, (Range{0, cols})) << tensor.name;
      }
      row_parts.push_back(shard.rows);
      col_parts.push_back(shard.cols);
      row_offsets.push_back(shard.row_offset);
      col_offsets.push_back(shard.col_offset);
    }
    if (axis == TensorShard::kRows) ExpectCovers(tensor.name, row_parts, row_offsets, rows);
    if (axis == TensorShard::kColumns) ExpectCovers(tensor.name, col_parts, col_offsets, cols);
  }
}

TEST(ShardPlanTest, OwnsEveryRowAndColumnOnceAtTheShapesOfFlash) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const WeightFormat experts : kExpertFormats) {
      ExpectEveryUnitOwned(FlashConfig(), ranks, experts);
    }
    EXPECT_FALSE(Plans(FlashConfig(), ranks)[0].cuts_activation_groups) << ranks;
  }
}

TEST(ShardPlanTest, OwnsEveryRowAndColumnOnceInTheSmallCheckpoints) {
  for (const char* name :
       {"tiny-recall", "tiny-random-3layer/mxfp4", "tiny-random-3layer/nvfp4-cast"}) {
    for (const int ranks : {1, 2}) {
      for (const WeightFormat experts : kExpertFormats) {
        ExpectEveryUnitOwned(Golden(name), ranks, experts);
      }
    }
    EXPECT_TRUE(Plans(Golden(name), 2)[0].cuts_activation_groups) << name;
  }
}

TEST(ShardPlanTest, CutsTheTensorsOfFlashWhereItSays) {
  const ModelConfig config = FlashConfig();
  const ShardPlan plan = *PlanShard(config, 1, 4);
  EXPECT_EQ(plan.heads, (Range{16, 16}));
  EXPECT_EQ(plan.groups, (Range{2, 2}));
  struct Row {
    const char* name;
    TensorShard::Axis axis;
    Range part;
  };
  const Row rows[] = {
      {"head.weight", TensorShard::kRows, {32320, 32320}},
      {"layers.2.attn.attn_sink", TensorShard::kRows, {16, 16}},
      {"layers.2.attn.wq_b.weight", TensorShard::kRows, {8192, 8192}},
      {"layers.2.attn.wq_b.scale", TensorShard::kRows, {64, 64}},
      {"layers.2.attn.wo_a.weight", TensorShard::kRows, {2048, 2048}},
      {"layers.2.attn.wo_a.scale", TensorShard::kRows, {16, 16}},
      {"layers.2.attn.wo_b.weight", TensorShard::kColumns, {2048, 2048}},
      {"layers.2.attn.wo_b.scale", TensorShard::kColumns, {16, 16}},
      {"layers.2.ffn.experts.9.w1.weight", TensorShard::kRows, {512, 512}},
      {"layers.2.ffn.experts.9.w3.weight_scale", TensorShard::kRows, {512, 512}},
      {"layers.2.ffn.experts.9.w2.weight", TensorShard::kColumns, {256, 256}},  // Pairs.
      {"layers.2.ffn.experts.9.w2.weight_scale", TensorShard::kColumns, {32, 32}},
      {"layers.2.ffn.shared_experts.w1.scale", TensorShard::kRows, {4, 4}},
      {"layers.2.ffn.shared_experts.w2.weight", TensorShard::kColumns, {512, 512}},
      {"layers.2.ffn.shared_experts.w2.scale", TensorShard::kColumns, {4, 4}},
      {"mtp.0.attn.wq_b.weight", TensorShard::kRows, {8192, 8192}},
  };
  for (const Row& row : rows) {
    const TensorShard shard = Find(config, plan, WeightFormat::kNvfp4, row.name);
    EXPECT_EQ(shard.axis, row.axis) << row.name;
    EXPECT_EQ(row.axis == TensorShard::kRows ? shard.rows : shard.cols, row.part) << row.name;
    EXPECT_EQ(shard.row_offset, 0) << row.name;
    EXPECT_EQ(shard.col_offset, 0) << row.name;
  }
}

TEST(ShardPlanTest, LeavesTheLatentPathWholeOnEveryRank) {
  const ModelConfig config = FlashConfig();
  const ShardPlan plan = *PlanShard(config, 3, 8);
  int whole = 0;
  for (const PlannedTensor& tensor : Tensors(config, WeightFormat::kMxfp4)) {
    const bool is_latent =
        absl::StrContains(tensor.name, "wq_a") || absl::StrContains(tensor.name, ".wkv") ||
        absl::StrContains(tensor.name, "norm") || absl::StrContains(tensor.name, "compressor") ||
        absl::StrContains(tensor.name, "indexer") || absl::StrContains(tensor.name, "gate") ||
        absl::StrContains(tensor.name, "hc_") || tensor.name == "embed.weight";
    const bool is_whole = ShardOf(config, plan, tensor).axis == TensorShard::kWhole;
    if (is_latent) {
      EXPECT_TRUE(is_whole) << tensor.name;
    }
    whole += is_latent ? 1 : 0;
  }
  EXPECT_GT(whole, 100);
}

// 128 inner columns are one block of the shared expert's w2: two ranks hold its scale.
TEST(ShardPlanTest, SharesTheScaleOfABlockThatIsCut) {
  const ModelConfig config = Golden("tiny-recall");
  for (const int rank : {0, 1}) {
    const ShardPlan plan = *PlanShard(config, rank, 2);
    const TensorShard elements =
        Find(config, plan, WeightFormat::kNvfp4, "layers.0.ffn.shared_experts.w2.weight");
    EXPECT_EQ(elements.cols, (Range{64 * rank, 64}));
    const TensorShard scales =
        Find(config, plan, WeightFormat::kNvfp4, "layers.0.ffn.shared_experts.w2.scale");
    EXPECT_EQ(scales.cols, (Range{0, 1}));
    EXPECT_EQ(scales.col_offset, 64 * rank);
    const TensorShard rows =
        Find(config, plan, WeightFormat::kNvfp4, "layers.0.ffn.shared_experts.w1.scale");
    EXPECT_EQ(rows.rows, (Range{0, 1}));
    EXPECT_EQ(rows.row_offset, 64 * rank);
  }
}

TEST(ShardPlanTest, FindsTheBlocksUnderARange) {
  const ScaleRange inside = ScaleBlocksUnder({96, 32}, 128);
  EXPECT_EQ(inside.blocks, (Range{0, 1}));
  EXPECT_EQ(inside.offset, 96);
  const ScaleRange across = ScaleBlocksUnder({96, 33}, 128);
  EXPECT_EQ(across.blocks, (Range{0, 2}));
  const ScaleRange later = ScaleBlocksUnder({256, 128}, 128);
  EXPECT_EQ(later.blocks, (Range{2, 1}));
  EXPECT_EQ(later.offset, 0);
  EXPECT_EQ(ScaleBlocksUnder({256, 0}, 128).blocks.count, 0);
}

void ExpectRefused(const ModelConfig& config, int rank, int ranks, const std::string& what,
                   const std::string& other) {
  const absl::StatusOr<ShardPlan> plan = PlanShard(config, rank, ranks);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument) << what;
  EXPECT_THAT(std::string(plan.status().message()), AllOf(HasSubstr(what), HasSubstr(other)));
}

TEST(ShardPlanTest, RefusesRanksThatTheShapesDoNotAllow) {
  ModelConfig config = FlashConfig();
  ExpectRefused(config, 0, 0, "rank is 0 of 0 ranks", "");
  ExpectRefused(config, 2, 2, "rank is 2 of 2 ranks", "");
  ExpectRefused(config, -1, 2, "rank is -1 of 2 ranks", "");
  ExpectRefused(config, 0, 3, "o_groups is 8", "3 ranks");
  ExpectRefused(config, 0, 16, "o_groups is 8", "16 ranks");
  ExpectRefused(Golden("tiny-recall"), 0, 4, "o_groups is 2", "4 ranks");
  config.vocab_size = 129281;
  ExpectRefused(config, 0, 2, "vocab_size is 129281", "2 ranks");
  config = FlashConfig();
  config.moe_intermediate_size = 2048 + 32;
  ExpectRefused(config, 0, 2, "moe_intermediate_size is 2080, 1040 a rank of 2", "32");
  config.moe_intermediate_size = 2048 + 4;
  ExpectRefused(config, 0, 8, "moe_intermediate_size is 2052", "8 ranks");
  EXPECT_TRUE(PlanShard(config, 0, 1).ok());  // One rank cuts nothing.
  config = FlashConfig();
  config.o_lora_rank = 144;  // The second part would begin at column 576 and leave its block.
  EXPECT_TRUE(PlanShard(config, 0, 2).ok());
  ExpectRefused(config, 0, 8, "wo_b would be cut at 144, 16 inside", "32");
}

TEST(ShardPlanTest, SharesIndexRowsEvenly) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int64_t rows : {0, 1, 3, 8, 13, 8192, 8191}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const Range part = IndexRows(rows, rank, ranks);
        EXPECT_EQ(part.first, next);
        EXPECT_LE(part.count, rows / ranks + 1);
        EXPECT_GE(part.count, rows / ranks);
        next = part.end();
      }
      EXPECT_EQ(next, rows) << ranks;
    }
  }
}

}  // namespace
}  // namespace isthmus::model
