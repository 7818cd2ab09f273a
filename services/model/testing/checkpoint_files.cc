// SPDX-License-Identifier: Apache-2.0
#include "services/model/testing/checkpoint_files.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "services/base/check.h"

namespace isthmus::model {
namespace {

constexpr uint32_t kSeed = 20260;

std::string ShardName(int shard, int num_shards) {
  return absl::StrFormat("model-%05d-of-%05d.safetensors", shard + 1, num_shards);
}

void PutFloat(StoredTensor* tensor, size_t index, float value) {
  std::memcpy(tensor->bytes.data() + 4 * index, &value, 4);
}

// Bytes that are valid for the type, and of moderate size.
void FillRandom(StoredTensor* tensor, std::mt19937* random) {
  size_t count = 1;
  for (const int64_t dim : tensor->shape) count *= static_cast<size_t>(dim);
  tensor->bytes.resize(count * static_cast<size_t>(TensorTypeBytes(tensor->type)));
  std::uniform_real_distribution<float> real(-1.0f, 1.0f);
  for (size_t i = 0; i < count; ++i) {
    switch (tensor->type) {
      case TensorType::kF32:
        PutFloat(tensor, i, tensor->shape.empty() ? 0.75f * 0x1p-9f : real(*random));
        break;
      case TensorType::kBf16: {
        const float value = real(*random);
        std::memcpy(tensor->bytes.data() + 2 * i, reinterpret_cast<const char*>(&value) + 2, 2);
        break;
      }
      case TensorType::kF8E4m3:  // Never 0x7f or 0xff.
        tensor->bytes[i] = static_cast<std::byte>((*random)() % 0x7f);
        break;
      case TensorType::kF8E8m0:
        tensor->bytes[i] = static_cast<std::byte>(115 + (*random)() % 8);
        break;
      default:
        tensor->bytes[i] = static_cast<std::byte>((*random)() & 0xff);
    }
  }
}

// Two distinct experts per token.
void FillHashIds(StoredTensor* tensor) {
  const auto k = static_cast<size_t>(tensor->shape[1]);
  const size_t count = static_cast<size_t>(tensor->shape[0]) * k;
  tensor->bytes.resize(8 * count);
  for (size_t i = 0; i < count; ++i) {
    const auto id = static_cast<int64_t>((i / k + i % k) % 4);
    std::memcpy(tensor->bytes.data() + 8 * i, &id, 8);
  }
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  path_ = (std::filesystem::temp_directory_path() / "isthmus-test-XXXXXX").string();
  ISTHMUS_CHECK(mkdtemp(path_.data()) != nullptr);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;  // A folder left behind must not fail a test.
  std::filesystem::remove_all(path_, ignored);
}

void WriteFileBytes(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ISTHMUS_CHECK(file.good());
}

StoredTensor& CheckpointFiles::Find(const std::string& name) {
  for (StoredTensor& tensor : tensors) {
    if (tensor.name == name) return tensor;
  }
  CheckFailed(__FILE__, __LINE__, name.c_str());
}

void CheckpointFiles::Erase(const std::string& name) {
  const size_t erased =
      std::erase_if(tensors, [&name](const StoredTensor& t) { return t.name == name; });
  ISTHMUS_CHECK(erased == 1);
}

void CheckpointFiles::Write(const std::string& dir) const {
  WriteFileBytes(dir + "/config.json", config_json);
  std::vector<std::vector<NamedTensor>> shards(static_cast<size_t>(num_shards));
  nlohmann::json weight_map = nlohmann::json::object();
  for (const StoredTensor& tensor : tensors) {
    shards[static_cast<size_t>(tensor.shard)].push_back(
        {tensor.name, std::string(TensorTypeName(tensor.type)), tensor.shape, tensor.bytes});
    weight_map[tensor.name] = ShardName(tensor.shard, num_shards);
  }
  for (int s = 0; s < num_shards; ++s) {
    const std::string name = has_index ? ShardName(s, num_shards) : "model.safetensors";
    ISTHMUS_CHECK(WriteSafetensors(absl::StrCat(dir, "/", name), shards[static_cast<size_t>(s)],
                                   {{"format", "pt"}})
                      .ok());
  }
  if (has_index) {
    WriteFileBytes(
        dir + "/model.safetensors.index.json",
        nlohmann::json{{"metadata", {{"total_size", 1}}}, {"weight_map", weight_map}}.dump());
  }
}

std::string MiniatureConfigJson() {
  return R"({
    "model_type": "deepseek_v4", "vocab_size": 40, "hidden_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128, "qk_rope_head_dim": 64,
    "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 128,
    "compress_ratios": [0, 4, 128, 4, 0], "index_n_heads": 2, "index_head_dim": 64,
    "index_topk": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc",
    "norm_topk_prob": true, "routed_scaling_factor": 1.5, "num_hash_layers": 1,
    "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-06,
    "rms_norm_eps": 1e-06, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "num_nextn_predict_layers": 1,
    "dspark_markov_rank": 8, "dspark_target_layer_ids": [1, 2, 3],
    "tie_word_embeddings": false, "hidden_act": "silu", "attention_bias": false,
    "bos_token_id": 0, "eos_token_id": 1})";
}

CheckpointFiles MiniatureCheckpoint(kernels::WeightFormat experts, bool is_dspark, int num_shards) {
  CheckpointFiles files;
  files.config_json = MiniatureConfigJson();
  files.num_shards = num_shards;
  files.has_index = num_shards > 1;
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(files.config_json);
  ISTHMUS_CHECK(config.ok());
  std::mt19937 random(kSeed);
  const MtpPlan mtp = {.num_stages = is_dspark ? 3 : 1, .is_dspark = is_dspark};
  int count = 0;
  for (PlannedTensor& planned : PlanTensors(*config, mtp, [experts](const std::string& base) {
         return IsMtpTensor(base) ? kernels::WeightFormat::kMxfp4 : experts;
       })) {
    StoredTensor tensor = {std::move(planned.name), planned.type, std::move(planned.shape), {}, 0};
    tensor.shard = count++ % num_shards;
    if (absl::EndsWith(tensor.name, "tid2eid")) {
      FillHashIds(&tensor);
    } else {
      FillRandom(&tensor, &random);
    }
    files.tensors.push_back(std::move(tensor));
  }
  return files;
}

void MakeLosslessCast(CheckpointFiles* files) {
  std::mt19937 random(kSeed + 1);
  for (StoredTensor& tensor : files->tensors) {
    if (absl::EndsWith(tensor.name, ".weight_scale_2")) PutFloat(&tensor, 0, 0x1p-9f);
    if (!absl::EndsWith(tensor.name, ".weight_scale")) continue;
    for (size_t i = 0; i + 1 < tensor.bytes.size(); i += 2) {
      // Powers of two from 2^-9 (three subnormal codes among them) to 2^8.
      const uint32_t choice = random() % 18;
      const uint32_t code = choice < 3 ? 1u << choice : (choice - 2) << 3;
      tensor.bytes[i] = tensor.bytes[i + 1] = static_cast<std::byte>(code);
    }
  }
}

}  // namespace isthmus::model
