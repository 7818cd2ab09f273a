// SPDX-License-Identifier: Apache-2.0
// Which part of every tensor one rank of a tensor-parallel group holds. Pure data: no weights, no
// device, so that any number of ranks can be planned and checked anywhere.
//
//   by heads             rows of wq_b, elements of attn_sink
//   by output groups     rows of wo_a, columns of wo_b; a rank has whole groups, and the heads
//                        whose outputs they read
//   by inner dimension   rows of w1 and w3, columns of w2, in every expert, routed or shared
//   by vocabulary        rows of the output head
//   whole on every rank  all else: wq_a, wkv, norms, compressor, indexer, gate, hyper-connections,
//                        and with them the latent cache, the index keys and the selection
//
// wo_b and w2 are cut along K: their outputs are partial sums, hence two all-reduces a layer, after
// wo_b and after the routed and shared experts.
//
// The embedding is whole on every rank. A step reads one row of it per token, so a share would save
// no traffic, only memory (0.53 GB of 1.06 at two ranks), and would cost one all-reduce more at the
// head of every step.
//
// The indexer is cut by query rows in prefill (IndexRows), never by heads: that would reduce the
// scores of every pair of a query and a key. Each row is then chosen by one rank and gathered, so
// all ranks attend to the same entries, bit for bit.
//
// A cut inside a scale block keeps the block's scale: both neighbours hold it, and nothing is
// quantised again.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "services/model/model_config.h"
#include "services/model/tensor_plan.h"

namespace isthmus::model {

// [first, first + count) of the rows, columns or blocks of a whole.
struct Range {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool operator==(const Range&) const = default;
};

// The scale blocks under a range, and how far inside the first one it begins.
struct ScaleRange {
  Range blocks;
  int64_t offset = 0;
};
ScaleRange ScaleBlocksUnder(const Range& range, int64_t block);

struct ShardPlan {
  int rank = 0;
  int ranks = 1;
  Range heads;           // Of num_attention_heads.
  Range query_rows;      // Rows of wq_b: heads x head_dim.
  Range groups;          // Of o_groups.
  Range output_columns;  // Rows of wo_a and columns of wo_b: groups x o_lora_rank.
  Range intermediate;    // Of moe_intermediate_size.
  Range vocabulary;      // Of vocab_size, rows of the head.

  // The reference arithmetic quantises the inputs of wo_b and w2 in groups of 128 columns. Where a
  // cut falls inside such a group each rank scales its part by its own largest value: as exact, but
  // not the bits of the whole. Never at the shapes of V4-Flash.
  bool cuts_activation_groups = false;
};

// InvalidArgument, with both values: `rank` is not in [0, ranks), or a dimension cannot be cut into
// so many parts. Parts are equal; those of the inner dimension are multiples of 32, one MXFP4 group
// and one k32 step of an mma, so that fp4 matrices are never cut inside a group.
absl::StatusOr<ShardPlan> PlanShard(const ModelConfig& config, int rank, int ranks);

// What a rank holds of one stored tensor.
struct TensorShard {
  enum Axis : uint8_t { kWhole, kRows, kColumns };
  Axis axis = kWhole;
  // In units of the stored tensor: pairs of fp4 values, blocks of scales. A vector has rows only,
  // and one column.
  Range rows;
  Range cols;
  // Scale tensors: rows and columns of the matrix that lie in the first block before the part.
  int64_t row_offset = 0;
  int64_t col_offset = 0;
};

// `tensor` is one of PlanTensors(config, …), those of draft stages included.
TensorShard ShardOf(const ModelConfig& config, const ShardPlan& plan, const PlannedTensor& tensor);

// The query rows of `rows` whose entries `rank` chooses: contiguous, at most one row more or less
// than the others, empty when there are fewer rows than ranks.
Range IndexRows(int64_t rows, int rank, int ranks);

}  // namespace isthmus::model
