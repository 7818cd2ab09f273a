// SPDX-License-Identifier: Apache-2.0
#include "services/model/shard_plan.h"

#include <string>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::model {
namespace {

constexpr int64_t kFp8Block = 128;      // Rows and columns of a scale block, and of an activation.
constexpr int64_t kInnerMultiple = 32;  // Of a part of the inner dimension.

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

Range Part(int64_t whole, int rank, int ranks) {
  const int64_t count = whole / ranks;
  return {rank * count, count};
}

Range Times(const Range& range, int64_t factor) {
  return {range.first * factor, range.count * factor};
}

absl::Status CheckDivides(absl::string_view field, int64_t value, int ranks) {
  if (value % ranks == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("shard plan: ", field, " is ", value, ", which ",
                                                 ranks, " ranks do not divide"));
}

// Columns of an fp8 matrix: a part that begins inside a scale block and leaves it must begin at a
// multiple of 32 (kernels/core/weight.h).
absl::Status CheckCut(absl::string_view field, const Range& columns) {
  const int64_t offset = columns.first % kFp8Block;
  if (offset + columns.count <= kFp8Block || offset % 32 == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("shard plan: ", field, " would be cut at ", columns.first, ", ", offset,
                   " inside a scale block, must be a multiple of 32"));
}

// A matrix that is cut: its shape, and the part of one axis.
struct CutMatrix {
  TensorShard::Axis axis = TensorShard::kWhole;
  int64_t rows = 0;
  int64_t cols = 0;
  Range part;
};

CutMatrix FindCut(const ModelConfig& c, const ShardPlan& plan, absl::string_view base) {
  const int64_t o_width = int64_t{c.o_groups} * c.o_lora_rank;
  const int64_t q_width = int64_t{c.num_attention_heads} * c.head_dim;
  const int64_t inner = c.moe_intermediate_size;
  if (base == "head") return {TensorShard::kRows, c.vocab_size, c.hidden_size, plan.vocabulary};
  if (absl::EndsWith(base, ".attn.wq_b")) {
    return {TensorShard::kRows, q_width, c.q_lora_rank, plan.query_rows};
  }
  if (absl::EndsWith(base, ".attn.wo_a")) {
    return {TensorShard::kRows, o_width, c.group_inputs(), plan.output_columns};
  }
  if (absl::EndsWith(base, ".attn.wo_b")) {
    return {TensorShard::kColumns, c.hidden_size, o_width, plan.output_columns};
  }
  if (absl::StrContains(base, ".ffn.")) {
    if (absl::EndsWith(base, ".w1") || absl::EndsWith(base, ".w3")) {
      return {TensorShard::kRows, inner, c.hidden_size, plan.intermediate};
    }
    if (absl::EndsWith(base, ".w2")) {
      return {TensorShard::kColumns, c.hidden_size, inner, plan.intermediate};
    }
  }
  return {};
}

// The name of a matrix without what is stored of it.
absl::string_view BaseName(absl::string_view name) {
  for (const absl::string_view suffix : {".weight", ".scale", ".weight_scale"}) {
    if (absl::ConsumeSuffix(&name, suffix)) return name;
  }
  return name;
}

}  // namespace

ScaleRange ScaleBlocksUnder(const Range& range, int64_t block) {
  const int64_t first = range.first / block;
  const int64_t count = range.count == 0 ? 0 : CeilDivide(range.end(), block) - first;
  return {{first, count}, range.first % block};
}

absl::StatusOr<ShardPlan> PlanShard(const ModelConfig& config, int rank, int ranks) {
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard plan: rank is ", rank, " of ", ranks, " ranks, must be in [0, ranks)"));
  }
  // Groups divide the heads (ValidateModelConfig), so whole groups are whole heads.
  ISTHMUS_RETURN_IF_ERROR(CheckDivides("o_groups", config.o_groups, ranks));
  ISTHMUS_RETURN_IF_ERROR(CheckDivides("vocab_size", config.vocab_size, ranks));
  const int64_t inner = config.moe_intermediate_size;
  ISTHMUS_RETURN_IF_ERROR(CheckDivides("moe_intermediate_size", inner, ranks));
  if (ranks > 1 && inner / ranks % kInnerMultiple != 0) {
    return absl::InvalidArgumentError(absl::StrCat("shard plan: moe_intermediate_size is ", inner,
                                                   ", ", inner / ranks, " a rank of ", ranks,
                                                   ", must be a multiple of ", kInnerMultiple));
  }
  ShardPlan plan;
  plan.rank = rank;
  plan.ranks = ranks;
  plan.groups = Part(config.o_groups, rank, ranks);
  plan.heads = Times(plan.groups, config.heads_per_group());
  plan.query_rows = Times(plan.heads, config.head_dim);
  plan.output_columns = Times(plan.groups, config.o_lora_rank);
  plan.intermediate = Part(inner, rank, ranks);
  plan.vocabulary = Part(config.vocab_size, rank, ranks);
  // The same answer on every rank: a group begins with the plan even if this rank's part fits.
  for (int r = 1; r < ranks; ++r) {
    ISTHMUS_RETURN_IF_ERROR(
        CheckCut("wo_b", Times(Part(config.o_groups, r, ranks), config.o_lora_rank)));
  }
  plan.cuts_activation_groups =
      ranks > 1 && (plan.output_columns.count % kFp8Block != 0 || inner / ranks % kFp8Block != 0);
  return plan;
}

TensorShard ShardOf(const ModelConfig& config, const ShardPlan& plan, const PlannedTensor& tensor) {
  const auto& shape = tensor.shape;
  TensorShard out;
  out.rows = {0, shape.empty() ? 1 : shape[0]};
  out.cols = {0, shape.size() < 2 ? 1 : shape[1]};
  if (absl::EndsWith(tensor.name, ".attn.attn_sink")) {
    out.axis = TensorShard::kRows;
    out.rows = plan.heads;
    return out;
  }
  if (shape.size() != 2) return out;
  const CutMatrix cut = FindCut(config, plan, BaseName(tensor.name));
  if (cut.axis == TensorShard::kWhole) return out;
  out.axis = cut.axis;
  // fp8 scales are those of square blocks; all else has one row per output, and its columns say
  // how many inputs one unit covers.
  const bool is_block_scale = shape[0] != cut.rows;
  ISTHMUS_CHECK(!is_block_scale || shape[0] == CeilDivide(cut.rows, kFp8Block));
  if (cut.axis == TensorShard::kRows) {
    const ScaleRange under = ScaleBlocksUnder(cut.part, is_block_scale ? kFp8Block : 1);
    out.rows = under.blocks;
    out.row_offset = under.offset;
  } else {
    const ScaleRange under =
        ScaleBlocksUnder(cut.part, is_block_scale ? kFp8Block : cut.cols / shape[1]);
    out.cols = under.blocks;
    out.col_offset = under.offset;
  }
  return out;
}

Range IndexRows(int64_t rows, int rank, int ranks) {
  ISTHMUS_CHECK(rows >= 0 && ranks > 0 && rank >= 0 && rank < ranks);
  const int64_t share = rows / ranks;
  const int64_t longer = rows % ranks;  // The first ranks have one row more.
  return {rank * share + (rank < longer ? rank : longer), share + (rank < longer ? 1 : 0)};
}

}  // namespace isthmus::model
