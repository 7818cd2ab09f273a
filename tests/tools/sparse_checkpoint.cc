// SPDX-License-Identifier: Apache-2.0
#include "tests/tools/sparse_checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "nlohmann/json.hpp"
#include "services/base/status_macros.h"
#include "services/model/safetensors_writer.h"
#include "services/model/tensor_plan.h"

namespace isthmus::tools {
namespace {

using model::ModelConfig;
using model::PlannedTensor;
using model::TensorEntry;

constexpr int kNumLayers = 43;
constexpr int kNumShards = kNumLayers + 3;

absl::Status FileError(const std::string& path, absl::string_view action) {
  return absl::ErrnoToStatus(errno, absl::StrCat(path, ": cannot ", action));
}

// Which shard, from 0, a tensor goes to.
int ShardOf(const std::string& name) {
  if (name == "embed.weight") return 0;
  if (model::IsMtpTensor(name)) return kNumShards - 1;
  const std::vector<std::string> parts = absl::StrSplit(name, '.');
  int layer = 0;
  if (parts[0] == "layers" && absl::SimpleAtoi(parts[1], &layer)) return layer + 1;
  return kNumShards - 2;
}

std::string ShardName(int shard) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, kNumShards);
}

absl::Status WriteAt(int fd, const std::string& path, const void* bytes, size_t size,
                     uint64_t offset) {
  const char* from = static_cast<const char*>(bytes);
  while (size > 0) {  // Each turn writes something or leaves.
    const ssize_t wrote = pwrite(fd, from, size, static_cast<off_t>(offset));
    if (wrote <= 0) return FileError(path, "write");
    from += wrote;
    size -= static_cast<size_t>(wrote);
    offset += static_cast<uint64_t>(wrote);
  }
  return absl::OkStatus();
}

std::vector<int64_t> HashIds(const TensorEntry& entry, int num_experts) {
  const int64_t k = entry.shape[1];
  std::vector<int64_t> ids(static_cast<size_t>(entry.shape[0] * k));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i) % num_experts;
  return ids;
}

absl::Status FillShard(int fd, const std::string& path, const std::string& header,
                       const std::vector<TensorEntry>& entries, int num_experts) {
  ISTHMUS_RETURN_IF_ERROR(WriteAt(fd, path, header.data(), header.size(), 0));
  const uint64_t file_bytes = header.size() + entries.back().end;
  if (ftruncate(fd, static_cast<off_t>(file_bytes)) != 0) return FileError(path, "extend");
  for (const TensorEntry& entry : entries) {
    if (!absl::EndsWith(entry.name, ".tid2eid")) continue;
    const std::vector<int64_t> ids = HashIds(entry, num_experts);
    ISTHMUS_RETURN_IF_ERROR(
        WriteAt(fd, path, ids.data(), 8 * ids.size(), header.size() + entry.begin));
  }
  return absl::OkStatus();
}

absl::Status WriteShard(const std::string& path, const std::vector<TensorEntry>& entries,
                        int num_experts) {
  ISTHMUS_ASSIGN_OR_RETURN(const std::string header,
                           model::FormatSafetensorsHeader(entries, {{"format", "pt"}}));
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return FileError(path, "create");
  absl::Status status = FillShard(fd, path, header, entries, num_experts);
  if (close(fd) != 0 && status.ok()) status = FileError(path, "close");
  return status;
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  return file.good() ? absl::OkStatus() : FileError(path, "write");
}

// Wide elements first, as the format's own library lays a file out, so that all are aligned.
std::vector<std::vector<TensorEntry>> LayOutShards(const std::vector<PlannedTensor>& plan) {
  std::vector<std::vector<TensorEntry>> shards(kNumShards);
  for (const int64_t width : {8, 4, 2, 1}) {
    for (const PlannedTensor& tensor : plan) {
      if (model::TensorTypeBytes(tensor.type) != width) continue;
      std::vector<TensorEntry>& shard = shards[static_cast<size_t>(ShardOf(tensor.name))];
      uint64_t bytes = static_cast<uint64_t>(width);
      for (const int64_t dim : tensor.shape) bytes *= static_cast<uint64_t>(dim);
      const uint64_t begin = shard.empty() ? 0 : shard.back().end;
      shard.push_back({tensor.name, tensor.type, tensor.shape, begin, begin + bytes});
    }
  }
  return shards;
}

}  // namespace

std::string FlashConfigJson() {
  nlohmann::json config = nlohmann::json::parse(R"({
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024,
    "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": true, "routed_scaling_factor": 1.5, "num_hash_layers": 3,
    "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1,
    "tie_word_embeddings": false, "attention_bias": false, "hidden_act": "silu",
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0",
      "activation_scheme": "dynamic", "weight_block_size": [128, 128],
      "moe_quant_algo": "NVFP4", "quant_algo": "MIXED_PRECISION", "group_size": 16}})");
  std::vector<int> ratios = {0, 0};
  for (int i = 2; i < kNumLayers; ++i) ratios.push_back(i % 2 == 0 ? 4 : 128);
  ratios.push_back(0);
  config["compress_ratios"] = ratios;
  return config.dump(2);
}

absl::Status WriteSparseCheckpoint(const std::string& dir) {
  const std::string config_json = FlashConfigJson();
  ISTHMUS_ASSIGN_OR_RETURN(const ModelConfig config, model::ParseModelConfig(config_json));
  const std::vector<PlannedTensor> plan =
      model::PlanTensors(config, {.num_stages = 1}, [](const std::string& base) {
        return model::IsMtpTensor(base) ? kernels::WeightFormat::kMxfp4
                                        : kernels::WeightFormat::kNvfp4;
      });
  const std::vector<std::vector<TensorEntry>> shards = LayOutShards(plan);
  nlohmann::json weight_map = nlohmann::json::object();
  uint64_t total_bytes = 0;
  for (int s = 0; s < kNumShards; ++s) {
    const std::vector<TensorEntry>& entries = shards[static_cast<size_t>(s)];
    ISTHMUS_RETURN_IF_ERROR(
        WriteShard(absl::StrCat(dir, "/", ShardName(s)), entries, config.n_routed_experts));
    for (const TensorEntry& entry : entries) weight_map[entry.name] = ShardName(s);
    total_bytes += entries.back().end;
  }
  const nlohmann::json index = {{"metadata", {{"total_size", total_bytes}}},
                                {"weight_map", weight_map}};
  ISTHMUS_RETURN_IF_ERROR(
      WriteText(absl::StrCat(dir, "/model.safetensors.index.json"), index.dump()));
  return WriteText(absl::StrCat(dir, "/config.json"), config_json);
}

}  // namespace isthmus::tools
