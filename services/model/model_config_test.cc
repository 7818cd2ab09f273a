// SPDX-License-Identifier: Apache-2.0
#include "services/model/model_config.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "services/model/testing/checkpoint_files.h"

namespace isthmus::model {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// The miniature's config with one field replaced, or erased when `value` is null.
std::string Changed(const std::string& field, const nlohmann::json& value) {
  nlohmann::json json = nlohmann::json::parse(MiniatureConfigJson());
  if (value.is_null()) {
    json.erase(field);
  } else {
    json[field] = value;
  }
  return json.dump();
}

std::string ErrorOf(const std::string& text) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << text;
  return std::string(config.status().message());
}

TEST(ModelConfigTest, ReadsEveryField) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(MiniatureConfigJson());
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->vocab_size, 40);
  EXPECT_EQ(config->hidden_size, 96);
  EXPECT_EQ(config->num_hidden_layers, 4);
  EXPECT_EQ(config->num_attention_heads, 4);
  EXPECT_EQ(config->head_dim, 128);
  EXPECT_EQ(config->q_lora_rank, 32);
  EXPECT_EQ(config->o_groups, 2);
  EXPECT_EQ(config->o_lora_rank, 16);
  EXPECT_EQ(config->group_inputs(), 256);
  EXPECT_THAT(config->compress_ratios, ElementsAre(0, 4, 128, 4, 0));
  EXPECT_EQ(config->index_topk, 16);
  EXPECT_EQ(config->num_experts_per_tok, 2);
  EXPECT_FLOAT_EQ(config->routed_scaling_factor, 1.5f);
  EXPECT_TRUE(config->is_hash_layer(0));
  EXPECT_FALSE(config->is_hash_layer(1));
  EXPECT_FLOAT_EQ(config->hc_eps, 1e-6f);
  EXPECT_DOUBLE_EQ(config->compress_rope_theta, 160000.0);
  EXPECT_DOUBLE_EQ(config->rope_scaling.factor, 16.0);
  EXPECT_EQ(config->rope_scaling.original_max_position_embeddings, 65536);
  EXPECT_EQ(config->max_position_embeddings, 1048576);
  EXPECT_EQ(config->eos_token_id, 1);
  EXPECT_THAT(config->dspark_target_layer_ids, ElementsAre(1, 2, 3));
}

TEST(ModelConfigTest, TakesTheNamesOfTheAuthorsInferenceConfig) {
  const absl::StatusOr<ModelConfig> config = ParseModelConfig(R"({
    "vocab_size": 40, "dim": 96, "n_layers": 2, "n_heads": 4, "head_dim": 128,
    "rope_head_dim": 64, "q_lora_rank": 32, "o_groups": 2, "o_lora_rank": 16, "window_size": 64,
    "compress_ratios": [0, 4], "n_routed_experts": 4, "n_activated_experts": 3,
    "moe_inter_dim": 64, "score_func": "sqrtsoftplus", "route_scale": 2.5, "n_hash_layers": 1,
    "norm_eps": 1e-5, "n_mtp_layers": 1, "rope_factor": 8, "original_seq_len": 4096,
    "beta_fast": 30, "beta_slow": 2, "expert_dtype": "fp4"})");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->hidden_size, 96);
  EXPECT_EQ(config->num_hidden_layers, 2);
  EXPECT_EQ(config->num_attention_heads, 4);
  EXPECT_EQ(config->sliding_window, 64);
  EXPECT_EQ(config->num_experts_per_tok, 3);
  EXPECT_EQ(config->moe_intermediate_size, 64);
  EXPECT_FLOAT_EQ(config->routed_scaling_factor, 2.5f);
  EXPECT_EQ(config->num_hash_layers, 1);
  EXPECT_FLOAT_EQ(config->rms_norm_eps, 1e-5f);
  EXPECT_EQ(config->num_nextn_predict_layers, 1);
  EXPECT_DOUBLE_EQ(config->rope_scaling.factor, 8.0);
  EXPECT_EQ(config->rope_scaling.original_max_position_embeddings, 4096);
  EXPECT_DOUBLE_EQ(config->rope_scaling.beta_fast, 30.0);
  EXPECT_DOUBLE_EQ(config->rope_scaling.beta_slow, 2.0);
}

TEST(ModelConfigTest, RefusesTwoNamesOfAFieldThatDisagree) {
  EXPECT_THAT(ErrorOf(Changed("dim", 128)), HasSubstr("hidden_size is 96, dim is 128"));
}

TEST(ModelConfigTest, TakesNullForAbsent) {
  EXPECT_TRUE(
      ParseModelConfig(absl::StrReplaceAll(MiniatureConfigJson(),
                                           {{"\"swiglu_limit\": 10.0", "\"swiglu_limit\": null"}}))
          .ok());
}

TEST(ModelConfigTest, RefusesTheLaterArchitectureByName) {
  EXPECT_THAT(ErrorOf(Changed("model_type", "deepseek_v41")),
              HasSubstr("model_type is deepseek_v41, wanted deepseek_v4"));
  EXPECT_THAT(ErrorOf(Changed("model_type", "llama")),
              HasSubstr("model_type is \"llama\", wanted \"deepseek_v4\""));
}

TEST(ModelConfigTest, RefusesWhatIsNotImplemented) {
  EXPECT_THAT(ErrorOf(Changed("scoring_func", "sigmoid")),
              HasSubstr("scoring_func is \"sigmoid\", only \"sqrtsoftplus\""));
  EXPECT_THAT(ErrorOf(Changed("score_func", "softmax")), HasSubstr("score_func"));
  EXPECT_THAT(ErrorOf(Changed("tie_word_embeddings", true)), HasSubstr("tie_word_embeddings"));
  EXPECT_THAT(ErrorOf(Changed("num_key_value_heads", 2)), HasSubstr("num_key_value_heads is 2"));
  EXPECT_THAT(ErrorOf(Changed("hidden_act", "gelu")), HasSubstr("hidden_act"));
  EXPECT_THAT(ErrorOf(Changed("rope_scaling", {{"type", "linear"}})),
              HasSubstr("rope_scaling: type is \"linear\""));
  EXPECT_THAT(ErrorOf(Changed("quantization_config", {{"weight_block_size", {64, 64}}})),
              HasSubstr("weight_block_size is [64,64], only [128,128]"));
}

TEST(ModelConfigTest, NamesTheFieldAndBothValuesOfABrokenRule) {
  const struct {
    const char* field;
    nlohmann::json value;
    const char* message;
  } kCases[] = {
      {"vocab_size", 0, "vocab_size is 0, must be in [1, "},
      {"hidden_size", 80, "hidden_size is 80, must be a multiple of 32"},
      {"hidden_size", -96, "hidden_size is -96, must be in [32, "},
      {"num_hidden_layers", 6, "compress_ratios has 5 entries, num_hidden_layers is 6"},
      {"num_hidden_layers", 2000, "num_hidden_layers is 2000, must be in [1, 1024]"},
      {"head_dim", 160, "head_dim - qk_rope_head_dim is 96, must be a multiple of 64"},
      {"head_dim", 64, "head_dim is 64, must be in [128, 576]"},
      {"qk_rope_head_dim", 32, "qk_rope_head_dim is 32, must be in [64, 64]"},
      {"q_lora_rank", 40, "q_lora_rank is 40, must be a multiple of 32"},
      {"o_lora_rank", 24, "o_lora_rank is 24, must be a multiple of 16"},
      {"o_groups", 3, "num_attention_heads is 4, o_groups is 3, must divide it"},
      {"moe_intermediate_size", 72, "moe_intermediate_size is 72, must be a multiple of 32"},
      {"index_head_dim", 96, "index_head_dim is 96, must be a power of two"},
      {"index_topk", 0, "index_topk is 0, must be in [1, "},
      {"num_experts_per_tok", 5, "num_experts_per_tok is 5, n_routed_experts is 4"},
      {"n_shared_experts", 2, "n_shared_experts is 2, must be in [1, 1]"},
      {"num_hash_layers", 5, "num_hash_layers is 5, num_hidden_layers is 4"},
      {"hc_mult", 2, "hc_mult is 2, must be in [4, 4]"},
      {"hc_sinkhorn_iters", 0, "hc_sinkhorn_iters is 0, must be in [1, 1000]"},
      {"sliding_window", 0, "sliding_window is 0"},
      {"eos_token_id", 40, "eos_token_id is 40, must be in [0, 39]"},
      {"rope_theta", 0, "rope_theta is 0, must be in [1, "},
      {"vocab_size", "many", "vocab_size is \"many\", must be an integer"},
      {"vocab_size", 40.5, "vocab_size is 40.5, must be an integer"},
      {"vocab_size", 5000000000, "vocab_size is 5000000000, must fit 32 bits"},
      {"vocab_size", 18446744073709551615u, "must be an integer"},
      {"rope_theta", "x", "rope_theta is \"x\", must be a number"},
      {"compress_ratios", {0, 4, 64, 4}, "compress_ratios[2] is 64, must be 0, 4 or 128"},
      {"compress_ratios", {0, 4, 128, 4, 4}, "compress_ratios[4] is 4, must be 0 (an mtp stage)"},
      {"compress_ratios", {0, 4, 128}, "compress_ratios has 3 entries, num_hidden_layers is 4"},
      {"compress_ratios", {0, "a"}, "compress_ratios holds \"a\""},
      {"compress_ratios", 4, "compress_ratios must be a list"},
      {"dspark_target_layer_ids", {4}, "dspark_target_layer_ids is 4, must be in [0, 3]"},
      {"rope_scaling", 3, "rope_scaling is 3, must be an object"},
      {"vocab_size", nullptr, "vocab_size is missing"},
      {"compress_ratios", nullptr, "compress_ratios is missing"},
      {"num_hash_layers", nullptr, "num_hash_layers is missing"},
  };
  for (const auto& c : kCases) {
    EXPECT_THAT(ErrorOf(Changed(c.field, c.value)), HasSubstr(c.message));
  }
}

TEST(ModelConfigTest, RefusesMalformedText) {
  EXPECT_THAT(ErrorOf(""), HasSubstr("config.json: not JSON"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("must be an object"));
  EXPECT_THAT(ErrorOf("{\"vocab_size\": 1, \"vocab_size\": 2}"),
              HasSubstr("key 'vocab_size' appears twice"));
  EXPECT_THAT(ErrorOf("{\"a\": \"\xff\"}"), HasSubstr("not JSON at byte"));
  EXPECT_THAT(ErrorOf("{\"a\": 1e999}"), HasSubstr("not JSON at byte"));
  EXPECT_THAT(ErrorOf("{\"a\": " + std::string(40, '[') + std::string(40, ']') + "}"),
              HasSubstr("nested deeper than 32"));
  EXPECT_THAT(ErrorOf(std::string(1'000'000, '[')), HasSubstr("nested deeper than 32"));
}

TEST(ModelConfigTest, LoadNamesAMissingFile) {
  const TemporaryFolder folder;
  const absl::StatusOr<ModelConfig> config = LoadModelConfig(folder.path());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(config.status().message()), HasSubstr(folder.File("config.json")));
}

TEST(ModelConfigTest, CanonicalFormShowsEveryDifference) {
  ModelConfig config = *ParseModelConfig(MiniatureConfigJson());
  const std::string before = CanonicalModelConfig(config);
  config.index_topk = 17;
  EXPECT_NE(CanonicalModelConfig(config), before);
  EXPECT_THAT(before, HasSubstr("compress_ratios=0,4,128,4,0\n"));
}

}  // namespace
}  // namespace isthmus::model
