// SPDX-License-Identifier: Apache-2.0
#include "services/model/step_memory.h"

#include <algorithm>
#include <filesystem>

#include "kernels/attention/attention.h"
#include "kernels/compressor/compressor.h"
#include "kernels/core/scratch_count.h"
#include "kernels/experts/experts.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/indexer/indexer.h"
#include "kernels/linear/linear.h"
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

namespace {

using kernels::ScratchCount;

// The attention half of a layer of `ratio`, in the order of forward_attention.cc.
int64_t AttentionHalfBytes(const ModelConfig& c, const StepSize& s, int ratio) {
  const bool reference = s.arithmetic == kernels::Arithmetic::kReference;
  const int64_t rows = s.rows;
  const int64_t hidden = c.hidden_size;
  const int64_t heads = int64_t{c.num_attention_heads} * c.head_dim;
  const int64_t entries = ratio == 4 ? s.max_tokens / ratio : 0;  // To choose from.
  const auto linear = [&](int64_t inputs, bool quantises = false) {
    return kernels::LinearScratchBytes(rows, inputs, quantises, s.threads);
  };
  const auto compressor = [&](int64_t dim) {
    return kernels::CompressorScratchBytes(rows, s.sequences, ratio, dim, s.threads);
  };
  ScratchCount half;
  if (reference) half.Take<float>(rows * hidden);  // The quantised input.
  half.Take<float>(rows * c.q_lora_rank);
  half.Take<float>(rows * c.head_dim);
  half.Lend(linear(hidden));
  half.Take<float>(rows * heads);
  if (entries > 0) half.Take<float>(rows * c.index_n_heads * c.index_head_dim);
  half.Lend(linear(c.q_lora_rank));
  if (ratio != 0) {
    const int64_t width = ratio == 4 ? 2 : 1;  // Of the compressors, in entries.
    for (int i = 0; i < 2; ++i) half.Take<float>(rows * width * c.head_dim);
    for (int i = 0; i < 2 && ratio == 4; ++i) half.Take<float>(rows * width * c.index_head_dim);
    if (entries > 0) half.Take<float>(rows * c.index_n_heads);
    half.Lend(linear(hidden));
    half.Lend(compressor(c.head_dim));
  }
  if (ratio == 4) half.Lend(compressor(c.index_head_dim));
  const int64_t selected = std::min<int64_t>(c.index_topk, entries);
  if (entries > 0) {
    half.Take<int32_t>(rows * selected);
    half.Lend(kernels::IndexerScratchBytes({.rows = rows,
                                            .sequences = s.sequences,
                                            .max_keys = entries,
                                            .topk = selected,
                                            .dim = c.index_head_dim},
                                           s.threads));
  }
  half.Lend(kernels::AttentionScratchBytes({.rows = rows,
                                            .sequences = s.sequences,
                                            .max_tokens = s.max_tokens,
                                            .window = c.sliding_window,
                                            .ratio = ratio,
                                            .max_selected = selected,
                                            .head_dim = c.head_dim,
                                            .stores_f32 = !reference},
                                           s.threads));
  const int64_t latent = int64_t{c.o_groups} * c.o_lora_rank;
  half.Take<float>(rows * latent);
  half.Lend(linear(heads / c.o_groups));
  half.Lend(linear(latent, reference));
  half.Lend(kernels::HyperConnectionScratchBytes(rows, hidden, s.threads));
  return half.peak_bytes();
}

// As forward_ffn.cc.
int64_t FfnHalfBytes(const ModelConfig& c, const StepSize& s) {
  const int64_t k = c.num_experts_per_tok;
  ScratchCount half;
  half.Take<float>(s.rows * c.n_routed_experts);
  half.Take<float>(s.rows * k);
  half.Take<int32_t>(s.rows * k);
  half.Lend(kernels::LinearScratchBytes(s.rows, c.hidden_size, false, s.threads));
  half.Lend(
      kernels::ExpertsScratchBytes({.tokens = s.rows,
                                    .k = k,
                                    .num_experts = c.n_routed_experts,
                                    .hidden = c.hidden_size,
                                    .intermediate = c.moe_intermediate_size,
                                    .has_shared = true,
                                    .quantises = s.arithmetic == kernels::Arithmetic::kReference},
                                   s.threads));
  return half.peak_bytes();
}

}  // namespace

int64_t StepScratchBytes(const ModelConfig& c, const StepSize& given) {
  StepSize s = given;
  s.sequences = std::min(s.sequences, s.rows);
  const int64_t hidden = c.hidden_size;
  const int64_t streams = 4 * hidden;
  ScratchCount pass;
  pass.Take<float>(s.rows * streams);
  pass.Take<float>(s.rows * hidden);
  pass.Take<float>(s.rows * hidden);
  pass.Take<float>(s.rows * 4);
  pass.Take<float>(s.rows * 16);
  pass.Lend(kernels::HyperConnectionScratchBytes(s.rows, hidden, s.threads));
  for (const int ratio : {0, 4, 128}) {
    for (int layer = 0; layer < c.num_hidden_layers; ++layer) {
      if (c.ratio(layer) != ratio) continue;
      pass.Lend(AttentionHalfBytes(c, s, ratio));
      break;
    }
  }
  pass.Lend(FfnHalfBytes(c, s));
  pass.Take<float>(s.logit_rows * streams);
  pass.Take<float>(s.logit_rows * hidden);
  pass.Lend(kernels::HyperConnectionScratchBytes(s.logit_rows, hidden, s.threads));
  pass.Lend(kernels::LinearScratchBytes(s.logit_rows, hidden, false, s.threads));
  return pass.peak_bytes();
}

int64_t DeviceScratchBound(const ModelConfig& c, const StepSize& step) {
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
  constexpr int64_t kDrawFloats = 9;  // A RowDraw, and the token that is drawn by it.
  const int64_t head = step.sequences * (6 * hidden + 3 * int64_t{c.vocab_size} + kDrawFloats);
  const int64_t blocks = step.threads * (int64_t{1} << 16);  // Of the products' and the indexer's.
  const int64_t peak =
      pass + blocks +
      std::max({attention + std::max({choosing, attending, projecting}), experts, head});
  // The stack's blocks double, so that what was too small for a later request stays unused.
  return 8 * peak + (int64_t{2} << 20);
}

}  // namespace isthmus::model
