// SPDX-License-Identifier: Apache-2.0
// The shape of a model: the fields of a checkpoint's config.json, by their Hugging Face names, read
// and checked once. The names of the author's inference/config.json are accepted as well. Source:
// model specification 1.1 to 1.3.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::model {

// YaRN, applied in layers with a ratio only (specification 3.3).
struct RopeScaling {
  double factor = 16.0;
  int64_t original_max_position_embeddings = 65536;  // 0: no YaRN.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
};

// Defaults are those of DeepSeek-V4-Flash. Fields without a default must stand in the file.
struct ModelConfig {
  int vocab_size = 0;
  int hidden_size = 0;
  int num_hidden_layers = 0;
  int num_attention_heads = 0;
  int head_dim = 512;
  int qk_rope_head_dim = 64;  // The last dims of a head; only 64 is implemented.
  int q_lora_rank = 0;
  int o_groups = 0;
  int o_lora_rank = 0;
  int sliding_window = 128;
  // 0 (window only), 4 (with indexer) or 128; at least num_hidden_layers entries, those after them
  // belong to the mtp stages.
  std::vector<int> compress_ratios;
  int index_n_heads = 64;
  int index_head_dim = 128;
  int index_topk = 512;
  int n_routed_experts = 0;
  int num_experts_per_tok = 0;
  int n_shared_experts = 1;
  int moe_intermediate_size = 0;
  float routed_scaling_factor = 1.5f;
  int num_hash_layers = 0;  // The first layers; they choose experts by token id.
  float swiglu_limit = 10.0f;
  int hc_mult = 4;
  int hc_sinkhorn_iters = 20;
  float hc_eps = 1e-6f;
  float rms_norm_eps = 1e-6f;
  double rope_theta = 10000.0;
  double compress_rope_theta = 160000.0;
  RopeScaling rope_scaling;
  int64_t max_position_embeddings = 1048576;
  int num_nextn_predict_layers = 0;
  int bos_token_id = 0;
  int eos_token_id = 1;
  // Rank of the DSpark draft head and the layers it reads (specification 1.2); 0 and empty when
  // the file names none.
  int dspark_markov_rank = 0;
  std::vector<int> dspark_target_layer_ids;
  // How the routed experts were quantised: "NVFP4" or empty. For planning alone, since the tensors'
  // own types decide; no part of the fingerprint.
  std::string moe_quant_algo;

  // Ratio of `layer` in [0, num_hidden_layers).
  int ratio(int layer) const { return compress_ratios[static_cast<size_t>(layer)]; }
  bool is_hash_layer(int layer) const { return layer < num_hash_layers; }
  // Heads that share one matrix of the output projection, and the inputs of that matrix.
  int heads_per_group() const { return num_attention_heads / o_groups; }
  int group_inputs() const { return heads_per_group() * head_dim; }
};

// Reads and validates `json`. InvalidArgument names the field, the value found and the one wanted:
// malformed JSON, a doubled key, nesting deeper than 32, a wrong type, an unknown architecture
// (model_type deepseek_v41 among them), a value that the operations cannot compute.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json);

// The same for `checkpoint_dir`/config.json. NotFound when there is none; the message names the
// path.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& checkpoint_dir);

// The checks alone, for a configuration that an override has changed.
absl::Status ValidateModelConfig(const ModelConfig& config);

// Every field in a fixed order and form, one "name=value" line each: what the fingerprint hashes.
std::string CanonicalModelConfig(const ModelConfig& config);

}  // namespace isthmus::model
