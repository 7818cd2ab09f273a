// SPDX-License-Identifier: Apache-2.0
#include "services/model/model_config.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "nlohmann/json.hpp"
#include "services/base/status_macros.h"
#include "services/model/bounded_json.h"
#include "services/model/file_bytes.h"

namespace isthmus::model {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMaxConfigBytes = 16 << 20;

absl::Status Bad(absl::string_view problem) {
  return absl::InvalidArgumentError(absl::StrCat("config.json: ", problem));
}

// A value as it may stand in a message.
std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
  constexpr size_t kMaxBytes = 200;
  if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
  return text;
}

// Takes fields out of one JSON object and remembers the first problem, so that a list of fields
// reads as a list. `alias` is the name in inference/config.json; both names must agree.
class FieldReader {
 public:
  explicit FieldReader(const Json& object) : object_(object) {}

  // Empty when all is well.
  const std::string& problem() const { return problem_; }

  void Int(const char* name, const char* alias, int* out, bool is_required = false) {
    int64_t value = *out;
    Int64(name, alias, &value, is_required);
    if (value < std::numeric_limits<int>::min() || value > std::numeric_limits<int>::max()) {
      return Fail(absl::StrCat(name, " is ", value, ", must fit 32 bits"));
    }
    *out = static_cast<int>(value);
  }

  void Int64(const char* name, const char* alias, int64_t* out, bool is_required = false) {
    const Json* value = Find(name, alias, is_required);
    if (value == nullptr) return;
    const bool fits =
        value->is_number_integer() &&
        (!value->is_number_unsigned() ||
         value->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
    if (!fits) return Fail(absl::StrCat(name, " is ", Shown(*value), ", must be an integer"));
    *out = value->get<int64_t>();
  }

  void Number(const char* name, const char* alias, double* out) {
    const Json* value = Find(name, alias, /*is_required=*/false);
    if (value == nullptr) return;
    if (!value->is_number()) {
      return Fail(absl::StrCat(name, " is ", Shown(*value), ", must be a number"));
    }
    *out = value->get<double>();
  }

  void Float(const char* name, const char* alias, float* out) {
    double value = *out;
    Number(name, alias, &value);
    if (std::fabs(value) > std::numeric_limits<float>::max()) {
      return Fail(absl::StrCat(name, " is ", value, ", must fit f32"));
    }
    *out = static_cast<float>(value);
  }

  void Ints(const char* name, std::vector<int>* out, bool is_required = false) {
    const Json* value = Find(name, nullptr, is_required);
    if (value == nullptr) return;
    if (!value->is_array() || value->size() > kMaxListEntries) {
      return Fail(absl::StrCat(name, " must be a list of at most ", kMaxListEntries, " integers"));
    }
    out->clear();
    for (const Json& item : *value) {
      if (!item.is_number_integer() || item < std::numeric_limits<int>::min() ||
          item > std::numeric_limits<int>::max()) {
        return Fail(absl::StrCat(name, " holds ", Shown(item), ", must hold integers"));
      }
      out->push_back(item.get<int>());
    }
  }

  void Text(const char* name, std::string* out) {
    const Json* value = Find(name, nullptr, /*is_required=*/false);
    if (value == nullptr) return;
    if (!value->is_string()) {
      return Fail(absl::StrCat(name, " is ", Shown(*value), ", must be a string"));
    }
    *out = value->get<std::string>();
  }

  // Fails when the field is there with any other value than `wanted`.
  void Only(const char* name, const char* alias, const Json& wanted) {
    const Json* value = Find(name, alias, /*is_required=*/false);
    if (value != nullptr && *value != wanted) {
      Fail(absl::StrCat(name, " is ", Shown(*value), ", only ", Shown(wanted), " is implemented"));
    }
  }

  // The nested object, or null when there is none.
  const Json* Object(const char* name) {
    const Json* value = Find(name, nullptr, /*is_required=*/false);
    if (value == nullptr || value->is_object()) return value;
    Fail(absl::StrCat(name, " is ", Shown(*value), ", must be an object"));
    return nullptr;
  }

  void Fail(absl::string_view problem) {
    if (problem_.empty()) problem_ = std::string(problem);
  }

 private:
  static constexpr size_t kMaxListEntries = 4096;

  // A null value counts as absent, as Hugging Face writes it.
  const Json* FindOne(const char* name) const {
    if (name == nullptr) return nullptr;
    const auto found = object_.find(name);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }

  const Json* Find(const char* name, const char* alias, bool is_required) {
    const Json* value = FindOne(name);
    const Json* other = FindOne(alias);
    if (value != nullptr && other != nullptr && *value != *other) {
      Fail(absl::StrCat(name, " is ", Shown(*value), ", ", alias, " is ", Shown(*other)));
    }
    if (value == nullptr) value = other;
    if (value == nullptr && is_required) Fail(absl::StrCat(name, " is missing"));
    return value;
  }

  const Json& object_;
  std::string problem_;
};

void ReadRopeScaling(FieldReader* fields, RopeScaling* out) {
  fields->Number("rope_factor", nullptr, &out->factor);
  fields->Int64("original_seq_len", nullptr, &out->original_max_position_embeddings);
  fields->Number("beta_fast", nullptr, &out->beta_fast);
  fields->Number("beta_slow", nullptr, &out->beta_slow);
  const Json* scaling = fields->Object("rope_scaling");
  if (scaling == nullptr) return;
  FieldReader nested(*scaling);
  nested.Only("type", "rope_type", "yarn");
  nested.Number("factor", nullptr, &out->factor);
  nested.Int64("original_max_position_embeddings", nullptr, &out->original_max_position_embeddings);
  nested.Number("beta_fast", nullptr, &out->beta_fast);
  nested.Number("beta_slow", nullptr, &out->beta_slow);
  if (!nested.problem().empty()) fields->Fail(absl::StrCat("rope_scaling: ", nested.problem()));
}

// Settings that change what is computed and of which one value is implemented.
void RefuseOtherArchitectures(FieldReader* fields, std::string* moe_quant_algo) {
  fields->Only("scoring_func", "score_func", "sqrtsoftplus");
  fields->Only("topk_method", nullptr, "noaux_tc");
  fields->Only("norm_topk_prob", nullptr, true);
  fields->Only("hidden_act", nullptr, "silu");
  fields->Only("tie_word_embeddings", nullptr, false);
  fields->Only("attention_bias", nullptr, false);
  fields->Only("num_key_value_heads", nullptr, 1);
  const Json* quantisation = fields->Object("quantization_config");
  if (quantisation == nullptr) return;
  FieldReader nested(*quantisation);
  nested.Only("quant_method", nullptr, "fp8");
  nested.Only("fmt", nullptr, "e4m3");
  nested.Only("scale_fmt", nullptr, "ue8m0");
  nested.Only("weight_block_size", nullptr, Json::array({128, 128}));
  nested.Text("moe_quant_algo", moe_quant_algo);
  if (!nested.problem().empty()) {
    fields->Fail(absl::StrCat("quantization_config: ", nested.problem()));
  }
}

absl::Status CheckModelType(const Json& json) {
  const auto type = json.find("model_type");
  if (type == json.end() || type->is_null() || *type == "deepseek_v4") return absl::OkStatus();
  if (*type == "deepseek_v41") {
    return Bad(
        "model_type is deepseek_v41, wanted deepseek_v4: DeepSeek-V4.1 is another architecture "
        "with another prompt format");
  }
  return Bad(absl::StrCat("model_type is ", Shown(*type), ", wanted \"deepseek_v4\""));
}

// One comparison of a validation; the message holds both sides.
absl::Status InRange(absl::string_view field, double value, double min, double max) {
  if (value >= min && value <= max) return absl::OkStatus();  // NaN fails.
  return Bad(absl::StrCat(field, " is ", value, ", must be in [", min, ", ", max, "]"));
}

absl::Status MultipleOf(absl::string_view field, int64_t value, int64_t unit) {
  if (value % unit == 0) return absl::OkStatus();
  return Bad(absl::StrCat(field, " is ", value, ", must be a multiple of ", unit));
}

absl::Status NotAbove(absl::string_view field, int64_t value, absl::string_view limit_field,
                      int64_t limit) {
  if (value <= limit) return absl::OkStatus();
  return Bad(
      absl::StrCat(field, " is ", value, ", ", limit_field, " is ", limit, ", must not be larger"));
}

absl::Status CheckRanges(const ModelConfig& c) {
  struct Row {
    const char* field;
    double value, min, max;
  };
  // Upper bounds keep every product of two dimensions, in bytes, far inside int64.
  const Row rows[] = {
      {"vocab_size", double(c.vocab_size), 1, 1 << 24},
      {"hidden_size", double(c.hidden_size), 32, 1 << 17},
      {"num_hidden_layers", double(c.num_hidden_layers), 1, 1024},
      {"num_attention_heads", double(c.num_attention_heads), 1, 1024},
      {"head_dim", double(c.head_dim), 128, 576},
      {"qk_rope_head_dim", double(c.qk_rope_head_dim), 64, 64},
      {"q_lora_rank", double(c.q_lora_rank), 32, 1 << 16},
      {"o_groups", double(c.o_groups), 1, 1024},
      {"o_lora_rank", double(c.o_lora_rank), 16, 1 << 16},
      {"sliding_window", double(c.sliding_window), 1, 1 << 16},
      {"index_n_heads", double(c.index_n_heads), 1, 1024},
      {"index_head_dim", double(c.index_head_dim), 64, 512},
      {"index_topk", double(c.index_topk), 1, 1 << 20},
      {"n_routed_experts", double(c.n_routed_experts), 1, 4096},
      {"num_experts_per_tok", double(c.num_experts_per_tok), 1, 64},
      {"n_shared_experts", double(c.n_shared_experts), 1, 1},
      {"moe_intermediate_size", double(c.moe_intermediate_size), 32, 1 << 17},
      {"routed_scaling_factor", c.routed_scaling_factor, 1e-6, 1e6},
      {"num_hash_layers", double(c.num_hash_layers), 0, 1024},
      {"swiglu_limit", c.swiglu_limit, 0, 1e9},
      {"hc_mult", double(c.hc_mult), 4, 4},
      {"hc_sinkhorn_iters", double(c.hc_sinkhorn_iters), 1, 1000},
      {"hc_eps", c.hc_eps, 0, 1},
      {"rms_norm_eps", c.rms_norm_eps, 0, 1},
      {"rope_theta", c.rope_theta, 1, 1e12},
      {"compress_rope_theta", c.compress_rope_theta, 1, 1e12},
      {"rope_scaling.factor", c.rope_scaling.factor, 1, 1e6},
      {"rope_scaling.original_max_position_embeddings",
       double(c.rope_scaling.original_max_position_embeddings), 0, 1 << 30},
      {"rope_scaling.beta_fast", c.rope_scaling.beta_fast, 1e-6, 1e6},
      {"rope_scaling.beta_slow", c.rope_scaling.beta_slow, 1e-6, 1e6},
      {"max_position_embeddings", double(c.max_position_embeddings), 1, 1 << 30},
      {"num_nextn_predict_layers", double(c.num_nextn_predict_layers), 0, 64},
      {"bos_token_id", double(c.bos_token_id), 0, double(c.vocab_size) - 1},
      {"eos_token_id", double(c.eos_token_id), 0, double(c.vocab_size) - 1},
      {"dspark_markov_rank", double(c.dspark_markov_rank), 0, 1 << 16},
  };
  for (const Row& row : rows) {
    ISTHMUS_RETURN_IF_ERROR(InRange(row.field, row.value, row.min, row.max));
  }
  return absl::OkStatus();
}

absl::Status CheckRatios(const ModelConfig& c) {
  if (c.compress_ratios.size() < static_cast<size_t>(c.num_hidden_layers)) {
    return Bad(absl::StrCat("compress_ratios has ", c.compress_ratios.size(),
                            " entries, num_hidden_layers is ", c.num_hidden_layers));
  }
  for (size_t i = 0; i < c.compress_ratios.size(); ++i) {
    const int ratio = c.compress_ratios[i];
    const bool is_layer = i < static_cast<size_t>(c.num_hidden_layers);
    if (is_layer ? ratio != 0 && ratio != 4 && ratio != 128 : ratio != 0) {
      return Bad(absl::StrCat("compress_ratios[", i, "] is ", ratio, ", must be ",
                              is_layer ? "0, 4 or 128" : "0 (an mtp stage)"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateModelConfig(const ModelConfig& c) {
  ISTHMUS_RETURN_IF_ERROR(CheckRanges(c));
  ISTHMUS_RETURN_IF_ERROR(CheckRatios(c));
  ISTHMUS_RETURN_IF_ERROR(MultipleOf("hidden_size", c.hidden_size, 32));
  ISTHMUS_RETURN_IF_ERROR(MultipleOf("q_lora_rank", c.q_lora_rank, 32));
  ISTHMUS_RETURN_IF_ERROR(MultipleOf("moe_intermediate_size", c.moe_intermediate_size, 32));
  // The part of a head without rotation fills whole fp8 scale blocks.
  ISTHMUS_RETURN_IF_ERROR(
      MultipleOf("head_dim - qk_rope_head_dim", c.head_dim - c.qk_rope_head_dim, 64));
  // Output groups are slices of one matrix that begin on a panel.
  ISTHMUS_RETURN_IF_ERROR(MultipleOf("o_lora_rank", c.o_lora_rank, 16));
  if (c.num_attention_heads % c.o_groups != 0) {
    return Bad(absl::StrCat("num_attention_heads is ", c.num_attention_heads, ", o_groups is ",
                            c.o_groups, ", must divide it"));
  }
  if ((c.index_head_dim & (c.index_head_dim - 1)) != 0) {
    return Bad(absl::StrCat("index_head_dim is ", c.index_head_dim,
                            ", must be a power of two (Hadamard transform)"));
  }
  ISTHMUS_RETURN_IF_ERROR(NotAbove("num_experts_per_tok", c.num_experts_per_tok, "n_routed_experts",
                                   c.n_routed_experts));
  ISTHMUS_RETURN_IF_ERROR(
      NotAbove("num_hash_layers", c.num_hash_layers, "num_hidden_layers", c.num_hidden_layers));
  for (const int layer : c.dspark_target_layer_ids) {
    ISTHMUS_RETURN_IF_ERROR(
        InRange("dspark_target_layer_ids", layer, 0, double(c.num_hidden_layers) - 1));
  }
  return absl::OkStatus();
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view text) {
  ISTHMUS_ASSIGN_OR_RETURN(const Json json, ParseBoundedJson(text, "config.json"));
  if (!json.is_object()) return Bad("must be an object");
  ISTHMUS_RETURN_IF_ERROR(CheckModelType(json));

  ModelConfig c;
  FieldReader fields(json);
  constexpr bool kRequired = true;
  fields.Int("vocab_size", nullptr, &c.vocab_size, kRequired);
  fields.Int("hidden_size", "dim", &c.hidden_size, kRequired);
  fields.Int("num_hidden_layers", "n_layers", &c.num_hidden_layers, kRequired);
  fields.Int("num_attention_heads", "n_heads", &c.num_attention_heads, kRequired);
  fields.Int("head_dim", nullptr, &c.head_dim);
  fields.Int("qk_rope_head_dim", "rope_head_dim", &c.qk_rope_head_dim);
  fields.Int("q_lora_rank", nullptr, &c.q_lora_rank, kRequired);
  fields.Int("o_groups", nullptr, &c.o_groups, kRequired);
  fields.Int("o_lora_rank", nullptr, &c.o_lora_rank, kRequired);
  fields.Int("sliding_window", "window_size", &c.sliding_window);
  fields.Ints("compress_ratios", &c.compress_ratios, kRequired);
  fields.Int("index_n_heads", nullptr, &c.index_n_heads);
  fields.Int("index_head_dim", nullptr, &c.index_head_dim);
  fields.Int("index_topk", nullptr, &c.index_topk);
  fields.Int("n_routed_experts", nullptr, &c.n_routed_experts, kRequired);
  fields.Int("num_experts_per_tok", "n_activated_experts", &c.num_experts_per_tok, kRequired);
  fields.Int("n_shared_experts", nullptr, &c.n_shared_experts);
  fields.Int("moe_intermediate_size", "moe_inter_dim", &c.moe_intermediate_size, kRequired);
  fields.Float("routed_scaling_factor", "route_scale", &c.routed_scaling_factor);
  fields.Int("num_hash_layers", "n_hash_layers", &c.num_hash_layers, kRequired);
  fields.Float("swiglu_limit", nullptr, &c.swiglu_limit);
  fields.Int("hc_mult", nullptr, &c.hc_mult);
  fields.Int("hc_sinkhorn_iters", nullptr, &c.hc_sinkhorn_iters);
  fields.Float("hc_eps", nullptr, &c.hc_eps);
  fields.Float("rms_norm_eps", "norm_eps", &c.rms_norm_eps);
  fields.Number("rope_theta", nullptr, &c.rope_theta);
  fields.Number("compress_rope_theta", nullptr, &c.compress_rope_theta);
  fields.Int64("max_position_embeddings", nullptr, &c.max_position_embeddings);
  fields.Int("num_nextn_predict_layers", "n_mtp_layers", &c.num_nextn_predict_layers);
  fields.Int("bos_token_id", nullptr, &c.bos_token_id);
  fields.Int("eos_token_id", nullptr, &c.eos_token_id);
  fields.Int("dspark_markov_rank", nullptr, &c.dspark_markov_rank);
  fields.Ints("dspark_target_layer_ids", &c.dspark_target_layer_ids);
  ReadRopeScaling(&fields, &c.rope_scaling);
  RefuseOtherArchitectures(&fields, &c.moe_quant_algo);
  if (!fields.problem().empty()) return Bad(fields.problem());
  ISTHMUS_RETURN_IF_ERROR(ValidateModelConfig(c));
  return c;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& checkpoint_dir) {
  const std::string path = absl::StrCat(checkpoint_dir, "/config.json");
  ISTHMUS_ASSIGN_OR_RETURN(const std::string text, ReadFileBytes(path, kMaxConfigBytes));
  absl::StatusOr<ModelConfig> config = ParseModelConfig(text);
  if (config.ok()) return config;
  return absl::Status(config.status().code(),
                      absl::StrCat(checkpoint_dir, ": ", config.status().message()));
}

std::string CanonicalModelConfig(const ModelConfig& c) {
  std::string out;
  const auto add = [&out](absl::string_view name, const auto& value) {
    absl::StrAppend(&out, name, "=", value, "\n");
  };
  add("vocab_size", c.vocab_size);
  add("hidden_size", c.hidden_size);
  add("num_hidden_layers", c.num_hidden_layers);
  add("num_attention_heads", c.num_attention_heads);
  add("head_dim", c.head_dim);
  add("qk_rope_head_dim", c.qk_rope_head_dim);
  add("q_lora_rank", c.q_lora_rank);
  add("o_groups", c.o_groups);
  add("o_lora_rank", c.o_lora_rank);
  add("sliding_window", c.sliding_window);
  add("compress_ratios", absl::StrJoin(c.compress_ratios, ","));
  add("index_n_heads", c.index_n_heads);
  add("index_head_dim", c.index_head_dim);
  add("index_topk", c.index_topk);
  add("n_routed_experts", c.n_routed_experts);
  add("num_experts_per_tok", c.num_experts_per_tok);
  add("n_shared_experts", c.n_shared_experts);
  add("moe_intermediate_size", c.moe_intermediate_size);
  add("routed_scaling_factor", c.routed_scaling_factor);
  add("num_hash_layers", c.num_hash_layers);
  add("swiglu_limit", c.swiglu_limit);
  add("hc_mult", c.hc_mult);
  add("hc_sinkhorn_iters", c.hc_sinkhorn_iters);
  add("hc_eps", c.hc_eps);
  add("rms_norm_eps", c.rms_norm_eps);
  add("rope_theta", c.rope_theta);
  add("compress_rope_theta", c.compress_rope_theta);
  add("rope_scaling.factor", c.rope_scaling.factor);
  add("rope_scaling.original_max_position_embeddings",
      c.rope_scaling.original_max_position_embeddings);
  add("rope_scaling.beta_fast", c.rope_scaling.beta_fast);
  add("rope_scaling.beta_slow", c.rope_scaling.beta_slow);
  add("max_position_embeddings", c.max_position_embeddings);
  add("num_nextn_predict_layers", c.num_nextn_predict_layers);
  add("bos_token_id", c.bos_token_id);
  add("eos_token_id", c.eos_token_id);
  add("dspark_markov_rank", c.dspark_markov_rank);
  add("dspark_target_layer_ids", absl::StrJoin(c.dspark_target_layer_ids, ","));
  return out;
}

}  // namespace isthmus::model
