// SPDX-License-Identifier: Apache-2.0
// Random weights of a model's shapes. A matrix's elements have a deviation of about 1 / sqrt(K), so
// that outputs are about as large as inputs and nothing overflows through any number of layers.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/weight_tiles.h"
#include "kernels/random_fill/random_fill.h"
#include "services/base/status_macros.h"
#include "services/model/device_weights.h"
#include "services/model/layer_tensors.h"

namespace isthmus::model {
namespace {

using kernels::RandomKind;
using kernels::RandomPart;
using kernels::WeightFormat;
using kernels::WeightView;

// Root mean square of uniformly chosen codes, of fp4 with the scales below.
constexpr double kFp8CodesRms = 110.0;
constexpr double kFp4CodesRms = 2.93;
constexpr double kNvfp4ScalesRms = 1.45;  // e4m3 codes 0x38 to 0x3f: 1 to 1.875.
constexpr double kMxfp4ScalesRms = 1.58;  // 1 or 2.

uint8_t Ue8m0Near(double value) {
  return static_cast<uint8_t>(std::clamp(127.0 + std::floor(std::log2(value)), 1.0, 254.0));
}

class Randomiser {
 public:
  // Counts when `base` is null.
  Randomiser(std::byte* base, uint64_t seed, const kernels::Exec& exec)
      : counts_(base == nullptr), place_(base), seed_(seed), exec_(exec) {}

  void Matrix(WeightView& w) {
    const int64_t bytes = kernels::TiledBytes(w);
    std::byte* const to = place_.Take(bytes);
    std::byte* const scales = place_.Take(BlockScaleBytes(w));
    if (counts_) return;
    w.layout = kernels::TileLayout(w.format, exec_.arch);
    w.elements = to;
    const double deviation = 1.0 / std::sqrt(static_cast<double>(w.cols));
    const auto limit = static_cast<float>(std::sqrt(3.0) * deviation);
    switch (w.format) {
      case WeightFormat::kF32:
        Fill(to, bytes, {.kind = RandomKind::kF32, .bytes = 4, .limit = limit});
        break;
      case WeightFormat::kBf16:
        Fill(to, bytes, {.kind = RandomKind::kBf16, .bytes = 4, .limit = limit});
        break;
      case WeightFormat::kFp8Block128:
        Fill(to, bytes, {.kind = RandomKind::kFp8, .bytes = 4});
        w.scales = reinterpret_cast<const uint8_t*>(scales);
        Fill(scales, (BlockScaleBytes(w) + 3) / 4 * 4,
             {.kind = RandomKind::kByteOfMask,
              .bytes = 4,
              .base = Ue8m0Near(deviation / kFp8CodesRms),
              .mask = 1});
        break;
      default:
        FillFp4(w, to, deviation);
    }
  }
  void Vector(kernels::VectorView& v) {
    // Norms, sinks and scales: near one. A bias of experts must be, or it decides the routing.
    v.data = Floats(v.size, 0.02f, 1.0f);
  }
  void Floats(const float*& p, int64_t n) { p = Floats(n, 0.5f, 0.0f); }
  void Ids(std::span<const int64_t>& ids) {
    std::byte* const to = place_.Take(static_cast<int64_t>(ids.size_bytes()));
    if (counts_ || ids.empty() || !status_.ok()) return;
    status_ =
        kernels::CopyToDevice(to, ids.data(), static_cast<int64_t>(ids.size_bytes()), exec_.stream);
    ids = {reinterpret_cast<const int64_t*>(to), ids.size()};
  }
  void Experts(LayerWeights& w) {
    const auto bytes = static_cast<int64_t>(w.experts.size() * sizeof(kernels::ExpertWeights));
    std::byte* const to = place_.Take(bytes);
    if (counts_ || !status_.ok()) return;
    status_ = kernels::CopyToDevice(to, w.experts.data(), bytes, exec_.stream);
    w.device_experts = reinterpret_cast<const kernels::ExpertWeights*>(to);
  }
  void Rows(WeightView& w) {
    std::byte* const to = place_.Take(2 * w.rows * w.cols);
    if (counts_) return;
    w.elements = to;
    Fill(to, 2 * w.rows * w.cols, {.kind = RandomKind::kBf16, .bytes = 4, .limit = 1.7f});
  }

  int64_t bytes() const { return place_.used(); }
  const absl::Status& status() const { return status_; }

 private:
  const float* Floats(int64_t n, float limit, float offset) {
    std::byte* const to = place_.Take(4 * n);
    if (!counts_) {
      Fill(to, 4 * n, {.kind = RandomKind::kF32, .bytes = 4, .limit = limit, .offset = offset});
    }
    return reinterpret_cast<const float*>(to);
  }

  void FillFp4(WeightView& w, std::byte* to, double deviation) {
    const int64_t tile = kernels::TileBytes(w.format);
    RandomPart scales = {.kind = RandomKind::kByteOfMask,
                         .bytes = tile - kernels::kTileCodeBytes,
                         .base = 0x38,
                         .mask = 7};
    if (w.format == WeightFormat::kMxfp4) {
      scales.base = Ue8m0Near(deviation / (kFp4CodesRms * kMxfp4ScalesRms));
      scales.mask = 1;
    } else {
      w.global_scale = static_cast<float>(deviation / (kFp4CodesRms * kNvfp4ScalesRms));
    }
    Fill(to, kernels::TiledBytes(w), {.kind = RandomKind::kBytes, .bytes = kernels::kTileCodeBytes},
         scales);
  }

  void Fill(std::byte* to, int64_t bytes, const RandomPart& first, const RandomPart& second = {}) {
    if (!status_.ok()) return;
    status_ = kernels::RandomFill({.to = to,
                                   .records = bytes / (first.bytes + second.bytes),
                                   .first = first,
                                   .second = second,
                                   .seed = ++seed_},
                                  exec_);
  }

  const bool counts_;
  Placement place_;
  uint64_t seed_;
  const kernels::Exec& exec_;
  absl::Status status_;
};

WeightView Shape(WeightFormat format, int64_t rows, int64_t cols) {
  return {.format = format, .rows = rows, .cols = cols};
}
kernels::VectorView VectorOf(int64_t size) { return kernels::F32Vector(nullptr, size); }

HyperConnectionWeights HyperConnectionOf(const ModelConfig& c, int64_t mixes, int64_t scales) {
  return {.fn = Shape(WeightFormat::kF32, mixes, int64_t{c.hc_mult} * c.hidden_size),
          .scale = VectorOf(scales),
          .base = VectorOf(mixes)};
}

CompressorWeights CompressorOf(const ModelConfig& c, int ratio, int dim) {
  CompressorWeights w;
  w.ratio = ratio;
  w.width = ratio == 4 ? 2 * dim : dim;
  w.wkv = Shape(WeightFormat::kBf16, w.width, c.hidden_size);
  w.wgate = w.wkv;
  w.norm = VectorOf(dim);
  return w;
}

kernels::ExpertWeights ExpertOf(const ModelConfig& c, const ShardPlan& plan, WeightFormat format) {
  const int64_t inner = plan.intermediate.count;
  return {.w1 = Shape(format, inner, c.hidden_size),
          .w3 = Shape(format, inner, c.hidden_size),
          .w2 = Shape(format, c.hidden_size, inner)};
}

// A layer as one rank has it, without memory. `hash_ids` are those of hash layers.
LayerWeights LayerOf(const ModelConfig& c, const ShardPlan& plan, int index, WeightFormat routed,
                     std::span<const int64_t> hash_ids) {
  constexpr WeightFormat kFp8 = WeightFormat::kFp8Block128;
  const int64_t mixes = int64_t{2 + c.hc_mult} * c.hc_mult;
  LayerWeights w;
  w.ratio = c.ratio(index);
  w.hc_attn = w.hc_ffn = HyperConnectionOf(c, mixes, 3);
  w.attn_norm = w.ffn_norm = VectorOf(c.hidden_size);
  w.wq_a = Shape(kFp8, c.q_lora_rank, c.hidden_size);
  w.q_norm = VectorOf(c.q_lora_rank);
  w.wq_b = Shape(kFp8, plan.query_rows.count, c.q_lora_rank);
  w.wkv = Shape(kFp8, c.head_dim, c.hidden_size);
  w.kv_norm = VectorOf(c.head_dim);
  w.attn_sink = VectorOf(plan.heads.count);
  w.wo_a.assign(static_cast<size_t>(plan.groups.count),
                Shape(kFp8, c.o_lora_rank, c.group_inputs()));
  w.wo_b = Shape(kFp8, c.hidden_size, plan.output_columns.count);
  if (w.ratio != 0) w.compressor = CompressorOf(c, w.ratio, c.head_dim);
  if (w.ratio == 4) {
    w.indexer = IndexerWeights{
        .wq_b = Shape(kFp8, int64_t{c.index_n_heads} * c.index_head_dim, c.q_lora_rank),
        .weights_proj = Shape(WeightFormat::kBf16, c.index_n_heads, c.hidden_size),
        .compressor = CompressorOf(c, 4, c.index_head_dim)};
  }
  w.gate = Shape(WeightFormat::kBf16, c.n_routed_experts, c.hidden_size);
  if (c.is_hash_layer(index)) {
    w.hash_ids = hash_ids;
  } else {
    w.gate_bias = VectorOf(c.n_routed_experts);
  }
  w.experts.assign(static_cast<size_t>(c.n_routed_experts), ExpertOf(c, plan, routed));
  w.shared = ExpertOf(c, plan, kFp8);
  return w;
}

// Distinct experts for every token, spread evenly.
std::vector<int64_t> RandomHashIds(const ModelConfig& c, uint64_t seed) {
  std::vector<int64_t> ids;
  if (c.num_hash_layers == 0) return ids;
  const int64_t k = c.num_experts_per_tok;
  ids.reserve(static_cast<size_t>(c.vocab_size * k));
  uint64_t state = seed;
  for (int64_t token = 0; token < c.vocab_size; ++token) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const auto first =
        static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(c.n_routed_experts));
    for (int64_t i = 0; i < k; ++i) {
      ids.push_back((first + i * std::max<int64_t>(1, c.n_routed_experts / k)) %
                    c.n_routed_experts);
    }
  }
  return ids;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceWeights>> DeviceWeights::Random(const ModelConfig& config,
                                                                     const ShardPlan& plan,
                                                                     WeightFormat routed,
                                                                     uint64_t seed,
                                                                     const kernels::Exec& exec) {
  if (!kernels::IsFp4(routed)) {
    return absl::InvalidArgumentError("random weights: routed experts are MXFP4 or NVFP4");
  }
  std::unique_ptr<DeviceWeights> out(new DeviceWeights());
  out->config_ = std::make_unique<ModelConfig>(config);
  const std::vector<int64_t> hash_ids = RandomHashIds(config, seed);
  // Waits, because the table of ids and the arrays of views are read by copies.
  kernels::DeviceEvent done;
  ISTHMUS_ASSIGN_OR_RETURN(done, kernels::DeviceEvent::Create());
  const auto finish = [&]() -> absl::Status {
    ISTHMUS_RETURN_IF_ERROR(done.Record(exec.stream));
    while (true) {
      ISTHMUS_ASSIGN_OR_RETURN(const bool has_passed, done.HasPassed());
      if (has_passed) return absl::OkStatus();
    }
  };
  for (int i = 0; i < config.num_hidden_layers; ++i) {
    LayerWeights layer = LayerOf(config, plan, i, routed, hash_ids);
    Randomiser counter(nullptr, 0, exec);
    VisitLayer(layer, counter);
    ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                             kernels::DeviceBuffer::Allocate(counter.bytes()));
    layer = LayerOf(config, plan, i, routed, hash_ids);
    Randomiser filler(buffer.data(), (seed << 40) + (static_cast<uint64_t>(i) << 20), exec);
    VisitLayer(layer, filler);
    ISTHMUS_RETURN_IF_ERROR(filler.status());
    ISTHMUS_RETURN_IF_ERROR(finish());
    out->layers_.push_back(std::move(layer));
    out->buffers_.push_back(std::move(buffer));
  }
  ModelViews& views = out->views_;
  views.embed = Shape(WeightFormat::kBf16, config.vocab_size, config.hidden_size);
  const auto shape = [&](ModelViews& v) {
    v.head = Shape(WeightFormat::kBf16, plan.vocabulary.count, config.hidden_size);
    v.norm = VectorOf(config.hidden_size);
    v.hc_head = HyperConnectionOf(config, config.hc_mult, 1);
  };
  const auto place = [&](ModelViews& v, Randomiser& randomiser) {
    VisitHyperConnection(v.hc_head, randomiser);
    randomiser.Matrix(v.head);
    randomiser.Vector(v.norm);
    randomiser.Rows(v.embed);
  };
  Randomiser counter(nullptr, 0, exec);
  shape(views);
  place(views, counter);
  ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceBuffer buffer,
                           kernels::DeviceBuffer::Allocate(counter.bytes()));
  Randomiser filler(buffer.data(), (seed << 40) + (uint64_t{1} << 36), exec);
  shape(views);
  place(views, filler);
  ISTHMUS_RETURN_IF_ERROR(filler.status());
  ISTHMUS_RETURN_IF_ERROR(finish());
  out->buffers_.push_back(std::move(buffer));
  views.config = out->config_.get();
  views.layers = out->layers_;
  views.on_device = true;
  return out;
}

}  // namespace isthmus::model
