// SPDX-License-Identifier: Apache-2.0
#include "services/model/tensor_plan.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "services/base/status_macros.h"
#include "services/model/bounded_json.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;

constexpr int64_t kMixes = 24;   // Outputs of a hyper-connection mix (specification 2.3).
constexpr int64_t kStreams = 4;  // hc_mult.
constexpr int kMaxMtpStages = 64;
constexpr size_t kMaxProblems = 16;

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Appends the tensors of one part of the model after another.
class Planner {
 public:
  Planner(const ModelConfig& config, ExpertFormatOf expert_format)
      : c_(config), expert_format_(expert_format) {}

  std::vector<PlannedTensor> Take() && { return std::move(tensors_); }

  void Trunk() {
    Add("embed.weight", TensorType::kBf16, {c_.vocab_size, c_.hidden_size});
    Add("head.weight", TensorType::kBf16, {c_.vocab_size, c_.hidden_size});
    HeadMix("");
  }

  // norm and hc_head of the main model, of an April block or of the last DSpark stage.
  void HeadMix(const std::string& prefix) {
    Add(prefix + "norm.weight", TensorType::kBf16, {c_.hidden_size});
    Add(prefix + "hc_head_fn", TensorType::kF32, {kStreams, kStreams * c_.hidden_size});
    Add(prefix + "hc_head_base", TensorType::kF32, {kStreams});
    Add(prefix + "hc_head_scale", TensorType::kF32, {1});
  }

  void Layer(const std::string& prefix, int ratio, bool is_hash) {
    for (const char* half : {"attn", "ffn"}) {
      Add(absl::StrCat(prefix, half, "_norm.weight"), TensorType::kBf16, {c_.hidden_size});
      const std::string hc = absl::StrCat(prefix, "hc_", half);
      Add(hc + "_fn", TensorType::kF32, {kMixes, kStreams * c_.hidden_size});
      Add(hc + "_base", TensorType::kF32, {kMixes});
      Add(hc + "_scale", TensorType::kF32, {3});
    }
    Attention(prefix + "attn.", ratio);
    Ffn(prefix + "ffn.", is_hash);
  }

  void AprilStage(const std::string& prefix) {
    Layer(prefix, /*ratio=*/0, /*is_hash=*/false);
    Add(prefix + "enorm.weight", TensorType::kBf16, {c_.hidden_size});
    Add(prefix + "hnorm.weight", TensorType::kBf16, {c_.hidden_size});
    Fp8(prefix + "e_proj", c_.hidden_size, c_.hidden_size);
    Fp8(prefix + "h_proj", c_.hidden_size, c_.hidden_size);
    HeadMix(prefix);
  }

  void DsparkStage(const std::string& prefix, bool is_first, bool is_last) {
    Layer(prefix, /*ratio=*/0, /*is_hash=*/false);
    if (is_first) {
      const auto sources = static_cast<int64_t>(c_.dspark_target_layer_ids.size());
      Fp8(prefix + "main_proj", c_.hidden_size, sources * c_.hidden_size);
      Add(prefix + "main_norm.weight", TensorType::kBf16, {c_.hidden_size});
    }
    if (is_last) {
      HeadMix(prefix);
      const int64_t rank = c_.dspark_markov_rank;
      Add(prefix + "markov_head.markov_w1.weight", TensorType::kBf16, {c_.vocab_size, rank});
      Add(prefix + "markov_head.markov_w2.weight", TensorType::kBf16, {c_.vocab_size, rank});
      Add(prefix + "confidence_head.proj.weight", TensorType::kBf16, {1, c_.hidden_size + rank});
    }
  }

 private:
  void Add(std::string name, TensorType type, std::vector<int64_t> shape) {
    tensors_.push_back({std::move(name), type, std::move(shape)});
  }

  void Fp8(const std::string& base, int64_t n, int64_t k) {
    Add(base + ".weight", TensorType::kF8E4m3, {n, k});
    Add(base + ".scale", TensorType::kF8E8m0, {CeilDivide(n, 128), CeilDivide(k, 128)});
  }

  void Expert(const std::string& base, int64_t n, int64_t k) {
    switch (expert_format_(base)) {
      case WeightFormat::kNvfp4:
        Add(base + ".weight", TensorType::kU8, {n, k / 2});
        Add(base + ".weight_scale", TensorType::kF8E4m3, {n, k / 16});
        Add(base + ".weight_scale_2", TensorType::kF32, {});
        Add(base + ".input_scale", TensorType::kF32, {});
        break;
      case WeightFormat::kMxfp4:
        Add(base + ".weight", TensorType::kI8, {n, k / 2});
        Add(base + ".scale", TensorType::kF8E8m0, {n, k / 32});
        break;
      default:
        Fp8(base, n, k);
    }
  }

  void Compressor(const std::string& prefix, int ratio, int64_t dim) {
    const int64_t width = ratio == 4 ? 2 * dim : dim;
    Add(prefix + "ape", TensorType::kF32, {ratio, width});
    Add(prefix + "norm.weight", TensorType::kBf16, {dim});
    Add(prefix + "wkv.weight", TensorType::kBf16, {width, c_.hidden_size});
    Add(prefix + "wgate.weight", TensorType::kBf16, {width, c_.hidden_size});
  }

  void Attention(const std::string& prefix, int ratio) {
    const int64_t q_width = int64_t{c_.num_attention_heads} * c_.head_dim;
    const int64_t o_width = int64_t{c_.o_groups} * c_.o_lora_rank;
    Add(prefix + "attn_sink", TensorType::kF32, {c_.num_attention_heads});
    Fp8(prefix + "wq_a", c_.q_lora_rank, c_.hidden_size);
    Add(prefix + "q_norm.weight", TensorType::kBf16, {c_.q_lora_rank});
    Fp8(prefix + "wq_b", q_width, c_.q_lora_rank);
    Fp8(prefix + "wkv", c_.head_dim, c_.hidden_size);
    Add(prefix + "kv_norm.weight", TensorType::kBf16, {c_.head_dim});
    Fp8(prefix + "wo_a", o_width, c_.group_inputs());
    Fp8(prefix + "wo_b", c_.hidden_size, o_width);
    if (ratio != 0) Compressor(prefix + "compressor.", ratio, c_.head_dim);
    if (ratio == 4) {
      Fp8(prefix + "indexer.wq_b", int64_t{c_.index_n_heads} * c_.index_head_dim, c_.q_lora_rank);
      Add(prefix + "indexer.weights_proj.weight", TensorType::kBf16,
          {c_.index_n_heads, c_.hidden_size});
      Compressor(prefix + "indexer.compressor.", ratio, c_.index_head_dim);
    }
  }

  void Ffn(const std::string& prefix, bool is_hash) {
    Add(prefix + "gate.weight", TensorType::kBf16, {c_.n_routed_experts, c_.hidden_size});
    if (is_hash) {
      Add(prefix + "gate.tid2eid", TensorType::kI64, {c_.vocab_size, c_.num_experts_per_tok});
    } else {
      Add(prefix + "gate.bias", TensorType::kF32, {c_.n_routed_experts});
    }
    for (int e = 0; e < c_.n_routed_experts; ++e) {
      const std::string expert = absl::StrCat(prefix, "experts.", e, ".");
      Expert(expert + "w1", c_.moe_intermediate_size, c_.hidden_size);
      Expert(expert + "w3", c_.moe_intermediate_size, c_.hidden_size);
      Expert(expert + "w2", c_.hidden_size, c_.moe_intermediate_size);
    }
    Fp8(prefix + "shared_experts.w1", c_.moe_intermediate_size, c_.hidden_size);
    Fp8(prefix + "shared_experts.w3", c_.moe_intermediate_size, c_.hidden_size);
    Fp8(prefix + "shared_experts.w2", c_.hidden_size, c_.moe_intermediate_size);
  }

  const ModelConfig& c_;
  ExpertFormatOf expert_format_;
  std::vector<PlannedTensor> tensors_;
};

// N of "mtp.N.…", or -1.
int MtpStage(absl::string_view name) {
  if (!IsMtpTensor(name)) return -1;
  const absl::string_view rest = name.substr(4);
  const absl::string_view digits = rest.substr(0, rest.find('.'));
  int stage = -1;
  const bool is_plain =
      digits.size() <= 2 && absl::SimpleAtoi(digits, &stage) && absl::StrCat(stage) == digits;
  return is_plain && stage < kMaxMtpStages ? stage : -1;
}

bool IsIgnored(absl::string_view name) {
  const int stage = MtpStage(name);
  return stage >= 0 && (name == absl::StrCat("mtp.", stage, ".emb.weight") ||
                        name == absl::StrCat("mtp.", stage, ".head.weight"));
}

absl::Status CheckMtp(const ModelConfig& config, const MtpPlan& mtp) {
  if (mtp.num_stages < config.num_nextn_predict_layers) {
    return absl::InvalidArgumentError(
        absl::StrCat("config.json says num_nextn_predict_layers ", config.num_nextn_predict_layers,
                     ", the checkpoint holds ", mtp.num_stages, " mtp stages: 'mtp.",
                     mtp.num_stages, ".*' is missing"));
  }
  const bool can_size = config.dspark_markov_rank > 0 && !config.dspark_target_layer_ids.empty();
  if (mtp.is_dspark && !can_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("the checkpoint holds a DSpark drafter (mtp.0.main_proj), config.json says "
                     "dspark_markov_rank ",
                     config.dspark_markov_rank, " and names ",
                     config.dspark_target_layer_ids.size(), " dspark_target_layer_ids"));
  }
  return absl::OkStatus();
}

// A broken configuration must not make us plan (and allocate) for millions of tensors.
absl::Status CheckSize(const ModelConfig& config, const Checkpoint& checkpoint) {
  const int64_t matrices = int64_t{3} * config.num_hidden_layers * config.n_routed_experts;
  const auto found = static_cast<int64_t>(checkpoint.tensors().size());
  if (matrices <= 4 * found + 4096) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("config.json asks for ", matrices,
                                                 " expert matrices, the checkpoint holds ", found,
                                                 " tensors"));
}

// Both sorted by name.
std::vector<std::string> ListProblems(const std::vector<PlannedTensor>& plan,
                                      const std::vector<CheckpointTensor>& found) {
  std::vector<std::string> problems;
  size_t p = 0;
  size_t f = 0;
  while (p < plan.size() || f < found.size()) {
    const int order = p == plan.size()    ? 1
                      : f == found.size() ? -1
                                          : plan[p].name.compare(found[f].name);
    if (order < 0) {
      problems.push_back(absl::StrCat("'", plan[p].name, "' is missing, expected ",
                                      TypeAndShape(plan[p].type, plan[p].shape)));
      ++p;
    } else if (order > 0) {
      if (!IsIgnored(found[f].name)) {
        problems.push_back(absl::StrCat("'", PrintableName(found[f].name), "' is surplus, found ",
                                        TypeAndShape(found[f].type, found[f].shape)));
      }
      ++f;
    } else {
      if (plan[p].type != found[f].type || plan[p].shape != found[f].shape) {
        problems.push_back(absl::StrCat("'", plan[p].name, "': expected ",
                                        TypeAndShape(plan[p].type, plan[p].shape), ", found ",
                                        TypeAndShape(found[f].type, found[f].shape)));
      }
      ++p;
      ++f;
    }
  }
  return problems;
}

}  // namespace

bool IsMtpTensor(absl::string_view name) { return absl::StartsWith(name, "mtp."); }

std::vector<PlannedTensor> PlanTensors(const ModelConfig& config, const MtpPlan& mtp,
                                       ExpertFormatOf expert_format) {
  Planner planner(config, expert_format);
  planner.Trunk();
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    planner.Layer(absl::StrCat("layers.", i, "."), config.ratio(i), config.is_hash_layer(i));
  }
  for (int i = 0; i < mtp.num_stages; ++i) {
    const std::string prefix = absl::StrCat("mtp.", i, ".");
    if (mtp.is_dspark) {
      planner.DsparkStage(prefix, i == 0, i == mtp.num_stages - 1);
    } else {
      planner.AprilStage(prefix);
    }
  }
  return std::move(planner).Take();
}

WeightFormat FindExpertFormat(const Checkpoint& checkpoint, const std::string& base) {
  const CheckpointTensor* weight = checkpoint.Find(base + ".weight");
  if (weight != nullptr) {
    if (weight->type == TensorType::kI8) return WeightFormat::kMxfp4;
    if (weight->type == TensorType::kU8) return WeightFormat::kNvfp4;
    if (weight->type == TensorType::kF8E4m3) return WeightFormat::kFp8Block128;
  }
  return checkpoint.Find(base + ".weight_scale") != nullptr ||
                 checkpoint.Find(base + ".weight_scale_2") != nullptr
             ? WeightFormat::kNvfp4
             : WeightFormat::kMxfp4;
}

MtpPlan FindMtpPlan(const Checkpoint& checkpoint) {
  MtpPlan mtp;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    mtp.num_stages = std::max(mtp.num_stages, MtpStage(tensor.name) + 1);
  }
  // Either of the two tensors that only a DSpark drafter has, so that one of them may be missed.
  mtp.is_dspark = checkpoint.Find("mtp.0.main_proj.weight") != nullptr ||
                  checkpoint.Find("mtp.0.main_norm.weight") != nullptr;
  return mtp;
}

absl::Status CheckTensors(const ModelConfig& config, const Checkpoint& checkpoint) {
  const MtpPlan mtp = FindMtpPlan(checkpoint);
  ISTHMUS_RETURN_IF_ERROR(CheckMtp(config, mtp));
  ISTHMUS_RETURN_IF_ERROR(CheckSize(config, checkpoint));
  std::vector<PlannedTensor> plan = PlanTensors(
      config, mtp,
      [&checkpoint](const std::string& base) { return FindExpertFormat(checkpoint, base); });
  std::sort(plan.begin(), plan.end(),
            [](const PlannedTensor& a, const PlannedTensor& b) { return a.name < b.name; });
  std::vector<std::string> problems = ListProblems(plan, checkpoint.tensors());
  if (problems.empty()) return absl::OkStatus();
  const size_t count = problems.size();
  if (count > kMaxProblems) problems.resize(kMaxProblems);
  std::string text =
      absl::StrCat("checkpoint does not fit its config.json, ", count,
                   count == 1 ? " tensor: " : " tensors: ", absl::StrJoin(problems, "; "));
  if (count > kMaxProblems) absl::StrAppend(&text, "; and ", count - kMaxProblems, " more");
  return absl::InvalidArgumentError(text);
}

}  // namespace isthmus::model
