// SPDX-License-Identifier: Apache-2.0
#include "services/model/step_memory.h"

#include <algorithm>
#include <filesystem>

#include "services/base/status_macros.h"
#include "services/model/checkpoint.h"
#include "services/model/shard_plan.h"
#include "services/model/tensor_plan.h"

namespace isthmus::model {

using kernels::WeightFormat;

absl::StatusOr<int64_t> WeightBytes(const ModelConfig& config, WeightFormat experts, int ranks) {
  int64_t most = 0;
  const std::vector<PlannedTensor> tensors =
      PlanTensors(config, {}, [experts](const std::string&) { return experts; });
  for (int rank = 0; rank < ranks; ++rank) {
    ISTHMUS_ASSIGN_OR_RETURN(const ShardPlan plan, PlanShard(config, rank, ranks));
    int64_t bytes = 0;
    for (const PlannedTensor& tensor : tensors) {
      const TensorShard shard = ShardOf(config, plan, tensor);
      bytes += TensorTypeBytes(tensor.type) * shard.rows.count * shard.cols.count;
    }
    most = std::max(most, bytes);
  }
  return most;
}

absl::StatusOr<WeightFormat> StoredExpertFormat(const std::string& checkpoint_dir,
                                                const ModelConfig& config) {
  const std::filesystem::path index =
      std::filesystem::path(checkpoint_dir) / "model.safetensors.index.json";
  std::error_code error;
  if (std::filesystem::exists(index, error)) {
    ISTHMUS_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(checkpoint_dir));
    return FindExpertFormat(checkpoint, "layers.0.ffn.experts.0.w1");
  }
  return config.moe_quant_algo == "NVFP4" ? WeightFormat::kNvfp4 : WeightFormat::kMxfp4;
}

int64_t StepBytes(const ModelConfig& c, const StepSize& step) {
  const int64_t hidden = c.hidden_size;
  const int64_t head_dim = c.head_dim;
  const int64_t heads = int64_t{c.num_attention_heads} * head_dim;
  const int64_t index_heads = int64_t{c.index_n_heads} * c.index_head_dim;
  const int64_t latent = int64_t{c.o_groups} * c.o_lora_rank;
  const int64_t used = c.num_experts_per_tok + 1;  // The shared expert as well.
  const int64_t entries = step.max_tokens / 4;
  // Row blocks of the products are padded to whole tiles; a few rows in each.
  const int64_t rows = step.rows + 8;

  // All in floats. For the whole pass: streams, what enters and leaves a half layer, its mixes.
  const int64_t pass = rows * (6 * hidden + 20);
  // Of the attention half: what lives throughout it, then the most that one operation takes.
  const int64_t attention = rows * (hidden + c.q_lora_rank + head_dim + heads + 4 * head_dim +
                                    int64_t{4} * c.index_head_dim + index_heads + c.index_n_heads +
                                    std::min<int64_t>(c.index_topk, entries) + latent);
  constexpr int64_t kScoreFloats = int64_t{8} << 20;    // indexer_cpu.cc, kMaxScoreFloats
  constexpr int64_t kSharedFloats = int64_t{16} << 20;  // attention_keys.cc, kMaxSharedBytes
  const int64_t choosing = std::min(rows * (entries + 1024), kScoreFloats + entries + 1024) +
                           int64_t{2} * step.threads * entries;
  const int64_t keys = c.sliding_window + std::max<int64_t>(c.index_topk, step.max_tokens / 128);
  // Decoded once for several rows of a sequence, which replies never have.
  const int64_t sharing = step.rows > step.sequences ? step.sequences : 0;
  const int64_t attending =
      std::min(sharing * entries * head_dim, kSharedFloats) +
      sharing * c.sliding_window * head_dim +
      step.threads * (keys * (head_dim + 2 + c.num_attention_heads) + entries / 32);
  const int64_t projecting = rows * (std::max({hidden, heads, 2 * latent}) + latent);
  // Of the other half: the choice, then the rows of all experts between their products, packed.
  const int64_t inner = c.moe_intermediate_size;
  const int64_t routed = rows * used;
  const int64_t packed = routed + 8 * std::min<int64_t>(c.n_routed_experts + 1, routed);
  const int64_t experts = rows * (hidden + c.n_routed_experts + 4 * used) +
                          routed * (hidden + 2 * inner) + packed * std::max(hidden, inner);
  const int64_t head = step.sequences * (6 * hidden + 3 * int64_t{c.vocab_size});
  const int64_t blocks = step.threads * (int64_t{1} << 16);  // Of the products' and the indexer's.
  const int64_t peak =
      pass + blocks +
      std::max({attention + std::max({choosing, attending, projecting}), experts, head});
  // The stack's blocks double, so that what was too small for a later request stays unused.
  return 8 * peak + (int64_t{2} << 20);
}

}  // namespace isthmus::model
