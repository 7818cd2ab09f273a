// SPDX-License-Identifier: Apache-2.0
#include "services/model/weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"
#include "services/model/checkpoint.h"
#include "services/model/fingerprint.h"
#include "services/model/tensor_plan.h"
#include "services/model/weight_packing.h"
#include "services/model/weight_storage.h"

namespace isthmus::model {

using kernels::VectorView;
using kernels::WeightFormat;
using kernels::WeightView;

// Fills a Weights from a checkpoint that fits its plan. Matrices are collected first, as views into
// the files with the place that each will be put; then their scales are inspected and, in packed
// residency, they are copied, both in parallel.
class WeightBuilder {
 public:
  WeightBuilder(const Checkpoint& checkpoint, bool is_packed, ThreadPool* threads, Weights* out)
      : checkpoint_(checkpoint), is_packed_(is_packed), threads_(threads), out_(out) {}

  absl::Status Build() {
    const ModelConfig& c = out_->config_;
    out_->layers_.resize(static_cast<size_t>(c.num_hidden_layers));
    output_a_.resize(out_->layers_.size());
    ISTHMUS_RETURN_IF_ERROR(Plain("embed.weight", &out_->embed_, /*keeps_rows=*/true));
    ISTHMUS_RETURN_IF_ERROR(Plain("head.weight", &out_->head_));
    ISTHMUS_ASSIGN_OR_RETURN(out_->norm_, Vector("norm.weight"));
    ISTHMUS_RETURN_IF_ERROR(HyperConnection("hc_head", &out_->hc_head_));
    for (int i = 0; i < c.num_hidden_layers; ++i) {
      const std::string prefix = absl::StrCat("layers.", i, ".");
      LayerWeights& layer = out_->layers_[static_cast<size_t>(i)];
      layer.ratio = c.ratio(i);
      ISTHMUS_RETURN_IF_ERROR(Attention(prefix, &layer, &output_a_[static_cast<size_t>(i)]));
      ISTHMUS_RETURN_IF_ERROR(Ffn(prefix, c.is_hash_layer(i), &layer));
    }
    ISTHMUS_RETURN_IF_ERROR(Inspect());
    CountExperts();
    if (is_packed_) {
      ISTHMUS_RETURN_IF_ERROR(Pack());
    } else {
      Map();
    }
    SliceOutputA();
    return absl::OkStatus();
  }

 private:
  // A matrix on its way to `target`.
  struct Matrix {
    std::string base;  // Name without ".weight".
    WeightView source;
    WeightView* target = nullptr;
    bool keeps_rows = false;
    bool is_expert = false;
    ScaleFindings findings;
    uint8_t* elements = nullptr;  // Packed: where to.
    uint8_t* scales = nullptr;
  };

  const CheckpointTensor& Tensor(const std::string& name) const {
    const CheckpointTensor* found = checkpoint_.Find(name);
    ISTHMUS_CHECK(found != nullptr);  // CheckTensors saw every planned tensor.
    return *found;
  }

  static const uint8_t* Bytes(const CheckpointTensor& tensor) {
    return reinterpret_cast<const uint8_t*>(tensor.bytes);
  }

  // A tensor of f32 or bf16 as f32, in memory of ours.
  absl::StatusOr<VectorView> Vector(const std::string& name) {
    const CheckpointTensor& tensor = Tensor(name);
    const int64_t size = tensor.size / TensorTypeBytes(tensor.type);
    ISTHMUS_ASSIGN_OR_RETURN(uint8_t* const bytes, out_->storage_->Take(4 * size));
    auto* values = reinterpret_cast<float*>(bytes);
    if (tensor.type == TensorType::kF32) {
      std::memcpy(values, tensor.bytes, static_cast<size_t>(tensor.size));
    } else {
      ISTHMUS_CHECK(tensor.type == TensorType::kBf16);
      for (int64_t i = 0; i < size; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, tensor.bytes + 2 * i, 2);
        values[i] = kernels::Bf16Value(bits);
      }
    }
    return kernels::F32Vector(values, size);
  }

  // A matrix without scales, at its stored width.
  absl::Status Plain(const std::string& name, WeightView* target, bool keeps_rows = false) {
    const CheckpointTensor& tensor = Tensor(name);
    Matrix matrix;
    matrix.base = name;
    matrix.source.format =
        tensor.type == TensorType::kF32 ? WeightFormat::kF32 : WeightFormat::kBf16;
    matrix.source.rows = tensor.shape[0];
    matrix.source.cols = tensor.shape[1];
    matrix.source.elements = tensor.bytes;
    matrix.target = target;
    matrix.keeps_rows = keeps_rows;
    const auto width = static_cast<uintptr_t>(TensorTypeBytes(tensor.type));
    if (reinterpret_cast<uintptr_t>(tensor.bytes) % width != 0) {
      // Only files not written by the format's own library misplace a tensor.
      ISTHMUS_ASSIGN_OR_RETURN(matrix.source.elements, Copy(tensor.bytes, tensor.size));
    }
    matrices_.push_back(std::move(matrix));
    return absl::OkStatus();
  }

  void Fp8(const std::string& base, WeightView* target) {
    const CheckpointTensor& tensor = Tensor(base + ".weight");
    Matrix matrix;
    matrix.base = base;
    matrix.source.format = WeightFormat::kFp8Block128;
    matrix.source.rows = tensor.shape[0];
    matrix.source.cols = tensor.shape[1];
    matrix.source.elements = tensor.bytes;
    matrix.source.scales = Bytes(Tensor(base + ".scale"));
    matrix.target = target;
    matrices_.push_back(std::move(matrix));
  }

  absl::Status Expert(const std::string& base, WeightView* target) {
    const WeightFormat format = FindExpertFormat(checkpoint_, base);
    if (format == WeightFormat::kFp8Block128) {
      Fp8(base, target);
      matrices_.back().is_expert = true;
      return absl::OkStatus();
    }
    const CheckpointTensor& tensor = Tensor(base + ".weight");
    Matrix matrix;
    matrix.base = base;
    matrix.source.format = format;
    matrix.source.rows = tensor.shape[0];
    matrix.source.cols = 2 * tensor.shape[1];
    matrix.source.elements = tensor.bytes;
    matrix.target = target;
    matrix.is_expert = true;
    if (format == WeightFormat::kMxfp4) {
      matrix.source.scales = Bytes(Tensor(base + ".scale"));
    } else {
      matrix.source.scales = Bytes(Tensor(base + ".weight_scale"));
      float& scale = matrix.source.global_scale;
      std::memcpy(&scale, Tensor(base + ".weight_scale_2").bytes, sizeof(scale));
      if (!std::isfinite(scale) || scale < 0.0f) {
        return absl::InvalidArgumentError(absl::StrCat("tensor '", base, ".weight_scale_2' is ",
                                                       scale, ", must be finite and not negative"));
      }
    }
    matrices_.push_back(std::move(matrix));
    return absl::OkStatus();
  }

  absl::Status HyperConnection(const std::string& prefix, HyperConnectionWeights* hc) {
    ISTHMUS_RETURN_IF_ERROR(Plain(prefix + "_fn", &hc->fn));
    ISTHMUS_ASSIGN_OR_RETURN(hc->scale, Vector(prefix + "_scale"));
    ISTHMUS_ASSIGN_OR_RETURN(hc->base, Vector(prefix + "_base"));
    return absl::OkStatus();
  }

  absl::Status Compressor(const std::string& prefix, int ratio, CompressorWeights* out) {
    ISTHMUS_RETURN_IF_ERROR(Plain(prefix + "wkv.weight", &out->wkv));
    ISTHMUS_RETURN_IF_ERROR(Plain(prefix + "wgate.weight", &out->wgate));
    ISTHMUS_ASSIGN_OR_RETURN(const VectorView ape, Vector(prefix + "ape"));
    ISTHMUS_ASSIGN_OR_RETURN(out->norm, Vector(prefix + "norm.weight"));
    out->ape = ape.f32();
    out->ratio = ratio;
    out->width = static_cast<int>(ape.size / ratio);
    return absl::OkStatus();
  }

  absl::Status Attention(const std::string& prefix, LayerWeights* layer, WeightView* output_a) {
    const std::string attn = prefix + "attn.";
    ISTHMUS_RETURN_IF_ERROR(HyperConnection(prefix + "hc_attn", &layer->hc_attn));
    ISTHMUS_ASSIGN_OR_RETURN(layer->attn_norm, Vector(prefix + "attn_norm.weight"));
    ISTHMUS_ASSIGN_OR_RETURN(layer->q_norm, Vector(attn + "q_norm.weight"));
    ISTHMUS_ASSIGN_OR_RETURN(layer->kv_norm, Vector(attn + "kv_norm.weight"));
    ISTHMUS_ASSIGN_OR_RETURN(layer->attn_sink, Vector(attn + "attn_sink"));
    Fp8(attn + "wq_a", &layer->wq_a);
    Fp8(attn + "wq_b", &layer->wq_b);
    Fp8(attn + "wkv", &layer->wkv);
    Fp8(attn + "wo_a", output_a);
    Fp8(attn + "wo_b", &layer->wo_b);
    if (layer->ratio != 0) {
      layer->compressor.emplace();
      ISTHMUS_RETURN_IF_ERROR(Compressor(attn + "compressor.", layer->ratio, &*layer->compressor));
    }
    if (layer->ratio == 4) {
      layer->indexer.emplace();
      Fp8(attn + "indexer.wq_b", &layer->indexer->wq_b);
      ISTHMUS_RETURN_IF_ERROR(
          Plain(attn + "indexer.weights_proj.weight", &layer->indexer->weights_proj));
      ISTHMUS_RETURN_IF_ERROR(
          Compressor(attn + "indexer.compressor.", layer->ratio, &layer->indexer->compressor));
    }
    return absl::OkStatus();
  }

  absl::Status Ffn(const std::string& prefix, bool is_hash, LayerWeights* layer) {
    const std::string ffn = prefix + "ffn.";
    ISTHMUS_RETURN_IF_ERROR(HyperConnection(prefix + "hc_ffn", &layer->hc_ffn));
    ISTHMUS_ASSIGN_OR_RETURN(layer->ffn_norm, Vector(prefix + "ffn_norm.weight"));
    ISTHMUS_RETURN_IF_ERROR(Plain(ffn + "gate.weight", &layer->gate));
    if (is_hash) {
      ISTHMUS_ASSIGN_OR_RETURN(layer->hash_ids, HashIds(ffn + "gate.tid2eid"));
    } else {
      ISTHMUS_ASSIGN_OR_RETURN(layer->gate_bias, Vector(ffn + "gate.bias"));
    }
    layer->experts.resize(static_cast<size_t>(out_->config_.n_routed_experts));
    for (size_t e = 0; e < layer->experts.size(); ++e) {
      const std::string base = absl::StrCat(ffn, "experts.", e, ".");
      ISTHMUS_RETURN_IF_ERROR(Expert(base + "w1", &layer->experts[e].w1));
      ISTHMUS_RETURN_IF_ERROR(Expert(base + "w3", &layer->experts[e].w3));
      ISTHMUS_RETURN_IF_ERROR(Expert(base + "w2", &layer->experts[e].w2));
    }
    Fp8(ffn + "shared_experts.w1", &layer->shared.w1);
    Fp8(ffn + "shared_experts.w3", &layer->shared.w3);
    Fp8(ffn + "shared_experts.w2", &layer->shared.w2);
    return absl::OkStatus();
  }

  // The table of a hash layer, every row checked: expert ids in range, no expert twice.
  absl::StatusOr<std::span<const int64_t>> HashIds(const std::string& name) {
    const CheckpointTensor& tensor = Tensor(name);
    const uint8_t* bytes = Bytes(tensor);
    if (is_packed_ || reinterpret_cast<uintptr_t>(bytes) % alignof(int64_t) != 0) {
      ISTHMUS_ASSIGN_OR_RETURN(bytes, Copy(bytes, tensor.size));
    }
    const std::span<const int64_t> ids(reinterpret_cast<const int64_t*>(bytes),
                                       static_cast<size_t>(tensor.size / 8));
    const auto k = static_cast<size_t>(tensor.shape[1]);
    for (size_t i = 0; i < ids.size(); ++i) {
      const size_t row = i / k * k;
      const bool is_doubled = std::find(&ids[row], &ids[i], ids[i]) != &ids[i];
      if (ids[i] >= 0 && ids[i] < out_->config_.n_routed_experts && !is_doubled) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("tensor '", name, "' holds expert ", ids[i], " at [", i / k, ", ", i % k,
                       "], ", is_doubled ? "twice in that row" : "must be in [0, ",
                       is_doubled ? "" : absl::StrCat(out_->config_.n_routed_experts, ")")));
    }
    return ids;
  }

  // Bytes of the elements in the file.
  static int64_t StoredBytes(const WeightView& w) {
    const int64_t elements = w.rows * w.cols;
    if (kernels::IsFp4(w.format)) return elements / 2;
    return w.format == WeightFormat::kF32    ? 4 * elements
           : w.format == WeightFormat::kBf16 ? 2 * elements
                                             : elements;
  }

  absl::StatusOr<uint8_t*> Copy(const void* bytes, int64_t size) {
    ISTHMUS_ASSIGN_OR_RETURN(uint8_t* const out, out_->storage_->Take(size));
    std::memcpy(out, bytes, static_cast<size_t>(size));
    return out;
  }

  void ForEachMatrix(absl::FunctionRef<void(Matrix&)> visit) {
    const auto count = static_cast<int64_t>(matrices_.size());
    const auto body = [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) visit(matrices_[static_cast<size_t>(i)]);
    };
    if (threads_ != nullptr) {
      threads_->ParallelFor(count, /*grain=*/8, body);
    } else {
      body(0, count, 0);
    }
  }

  absl::Status Inspect() {
    ForEachMatrix(
        [this](Matrix& m) { m.findings = InspectScales(m.source, /*only_sample=*/!is_packed_); });
    for (const Matrix& m : matrices_) {
      if (!m.findings.nan_at) continue;
      const char* suffix = m.source.format == WeightFormat::kNvfp4 ? ".weight_scale" : ".scale";
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor '", m.base, suffix, "' holds byte ", int{m.findings.nan_byte}, " = NaN at [",
          m.findings.nan_at->first, ", ", m.findings.nan_at->second, "], must be a number"));
    }
    return absl::OkStatus();
  }

  void CountExperts() {
    WeightReport& report = out_->report_;
    for (const Matrix& m : matrices_) {
      if (!m.is_expert) continue;
      report.mxfp4_expert_matrices += m.source.format == WeightFormat::kMxfp4 ? 1 : 0;
      report.nvfp4_expert_matrices += m.source.format == WeightFormat::kNvfp4 ? 1 : 0;
      report.fp8_expert_matrices += m.source.format == WeightFormat::kFp8Block128 ? 1 : 0;
      report.lossless_casts += m.findings.is_mxfp4_cast ? 1 : 0;
    }
  }

  absl::Status Pack() {
    for (Matrix& m : matrices_) {  // Memory first, one after another; then the copies.
      WeightView stored = m.source;
      if (m.findings.is_mxfp4_cast) stored.format = WeightFormat::kMxfp4;
      ISTHMUS_ASSIGN_OR_RETURN(m.elements, out_->storage_->Take(CopiedElementBytes(stored)));
      ISTHMUS_ASSIGN_OR_RETURN(m.scales, out_->storage_->Take(CopiedScaleBytes(stored)));
    }
    ForEachMatrix([](Matrix& m) {
      if (m.keeps_rows) {
        std::memcpy(m.elements, m.source.elements, static_cast<size_t>(StoredBytes(m.source)));
        *m.target = m.source;
        m.target->elements = m.elements;
      } else if (m.findings.is_mxfp4_cast) {
        std::vector<uint8_t> scales(static_cast<size_t>(m.source.rows * (m.source.cols / 32)));
        const WeightView rebuilt = RebuildMxfp4(m.source, scales.data());
        *m.target = CopyToPanels(rebuilt, m.elements, m.scales);
      } else {
        *m.target = CopyToPanels(m.source, m.elements, m.scales);
      }
      // The copy replaces the file's pages: without this, both would count as resident.
      ReleaseFilePages(m.source.elements, StoredBytes(m.source));
    });
    return absl::OkStatus();
  }

  void Map() {
    for (Matrix& m : matrices_) {
      *m.target = m.source;
      m.target->is_mxfp4_cast = m.findings.is_mxfp4_cast;
    }
  }

  void SliceOutputA() {
    const ModelConfig& c = out_->config_;
    for (size_t i = 0; i < out_->layers_.size(); ++i) {
      for (int g = 0; g < c.o_groups; ++g) {
        out_->layers_[i].wo_a.push_back(
            kernels::RowSlice(output_a_[i], int64_t{g} * c.o_lora_rank, c.o_lora_rank));
      }
    }
  }

  const Checkpoint& checkpoint_;
  const bool is_packed_;
  ThreadPool* const threads_;
  Weights* const out_;
  std::vector<Matrix> matrices_;
  std::vector<WeightView> output_a_;  // Per layer: wo_a of all groups.
};

namespace {

// Bytes of everything but mtp stages, which is what packing would copy.
int64_t ExecutedBytes(const Checkpoint& checkpoint) {
  int64_t total = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    if (!IsMtpTensor(tensor.name)) total += tensor.size;
  }
  return total;
}

absl::Status WithDirectory(const std::string& dir, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(dir, ": ", status.message()));
}

}  // namespace

Weights::Weights() : storage_(std::make_unique<WeightStorage>()) {}
Weights::~Weights() = default;

const LayerWeights& Weights::layer(int layer) const {
  ISTHMUS_CHECK(layer >= 0 && static_cast<size_t>(layer) < layers_.size());
  return layers_[static_cast<size_t>(layer)];
}

ModelViews Weights::views() const {
  return {.config = &config_,
          .embed = embed_,
          .head = head_,
          .norm = norm_,
          .hc_head = hc_head_,
          .layers = layers_};
}

absl::StatusOr<std::unique_ptr<Weights>> Weights::Load(const std::string& checkpoint_dir,
                                                       const WeightOptions& options,
                                                       ThreadPool* threads) {
  std::unique_ptr<Weights> weights(new Weights());
  if (options.config != nullptr) {
    weights->config_ = *options.config;
  } else {
    ISTHMUS_ASSIGN_OR_RETURN(weights->config_, LoadModelConfig(checkpoint_dir));
  }
  if (options.index_topk) {
    const int64_t topk = *options.index_topk;
    weights->config_.index_topk = static_cast<int>(std::clamp<int64_t>(topk, 0, 1 << 30));
    ISTHMUS_RETURN_IF_ERROR(ValidateModelConfig(weights->config_));
  }
  ISTHMUS_ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::Open(checkpoint_dir));
  if (absl::Status fits = CheckTensors(weights->config_, checkpoint); !fits.ok()) {
    return WithDirectory(checkpoint_dir, fits);
  }
  const bool is_packed = options.residency == WeightOptions::kPacked ||
                         (options.residency == WeightOptions::kAuto &&
                          ExecutedBytes(checkpoint) <= options.packed_limit_bytes);
  if (!is_packed) {
    for (const SafetensorsFile& file : checkpoint.shards()) file.ExpectScatteredReads(true);
  }
  weights->fingerprint_ = WeightFingerprint(weights->config_, checkpoint, threads);
  WeightReport& report = weights->report_;
  report.num_shards = checkpoint.num_shards();
  report.num_tensors = static_cast<int64_t>(checkpoint.tensors().size());
  report.num_mtp_stages = FindMtpPlan(checkpoint).num_stages;
  report.is_packed = is_packed;
  WeightBuilder builder(checkpoint, is_packed, threads, weights.get());
  if (absl::Status built = builder.Build(); !built.ok()) {
    return WithDirectory(checkpoint_dir, built);
  }
  if (!is_packed) {
    for (const SafetensorsFile& file : checkpoint.shards()) file.ExpectScatteredReads(false);
    weights->storage_->Keep(std::move(checkpoint).TakeShards());
  }
  report.allocated_bytes = weights->storage_->taken_bytes();
  report.mapped_bytes = weights->storage_->mapped_bytes();
  return weights;
}

}  // namespace isthmus::model
