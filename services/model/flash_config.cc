// SPDX-License-Identifier: Apache-2.0
#include "services/model/flash_config.h"

#include <algorithm>

#include "services/base/check.h"

namespace isthmus::model {

ModelConfig FlashConfig(int num_layers) {
  ISTHMUS_CHECK(num_layers >= 1 && num_layers <= 43);
  ModelConfig config;
  config.vocab_size = 129280;
  config.hidden_size = 4096;
  config.num_hidden_layers = num_layers;
  config.num_attention_heads = 64;
  config.q_lora_rank = 1024;
  config.o_groups = 8;
  config.o_lora_rank = 1024;
  config.n_routed_experts = 256;
  config.num_experts_per_tok = 6;
  config.moe_intermediate_size = 2048;
  config.num_hash_layers = std::min(num_layers, 3);
  config.compress_ratios = {0, 0};
  while (static_cast<int>(config.compress_ratios.size()) < num_layers) {
    config.compress_ratios.push_back(config.compress_ratios.size() % 2 == 0 ? 4 : 128);
  }
  config.compress_ratios.resize(static_cast<size_t>(num_layers));
  return config;
}

}  // namespace isthmus::model
