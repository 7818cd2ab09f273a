// SPDX-License-Identifier: Apache-2.0
#include "services/diag/step_cost.h"

#include <algorithm>
#include <set>

#include "kernels/core/weight_tiles.h"
#include "services/base/status_macros.h"
#include "services/model/layer_tensors.h"

namespace isthmus::diag {
namespace {

// Sums matrices; vectors are nothing beside them.
class ByteSum {
 public:
  void Matrix(kernels::WeightView& w) { bytes_ += StoredBytes(w); }
  void Vector(kernels::VectorView& v) { bytes_ += 4 * v.size; }
  void Floats(const float*&, int64_t n) { bytes_ += 4 * n; }
  void Ids(std::span<const int64_t>&) {}
  void Experts(model::LayerWeights&) {}
  int64_t bytes() const { return bytes_; }

 private:
  int64_t bytes_ = 0;
};

int64_t ExpertBytes(const kernels::ExpertWeights& w) {
  return StoredBytes(w.w1) + StoredBytes(w.w3) + StoredBytes(w.w2);
}

int64_t EntryBytes(const kernels::CacheKind& kind) {
  return kind.entry_data_bytes + kind.entry_scale_bytes;
}

// What one sequence's query reads in one layer.
int64_t CacheBytes(const kernels::KvLayout& layout, const model::ModelConfig& config, int ratio,
                   int64_t context) {
  int64_t bytes = std::min<int64_t>(context, config.sliding_window) *
                  EntryBytes(layout.kinds[kernels::kWindow]);
  if (ratio == 4) {
    const int64_t entries = context / 4;
    bytes +=
        std::min<int64_t>(entries, config.index_topk) * EntryBytes(layout.kinds[kernels::kCsaKv]);
    bytes += entries * EntryBytes(layout.kinds[kernels::kIndexKey]);
  } else if (ratio == 128) {
    bytes += context / 128 * EntryBytes(layout.kinds[kernels::kHcaKv]);
  }
  return bytes;
}

}  // namespace

int64_t StoredBytes(const kernels::WeightView& w) {
  return kernels::TiledBytes(w) + model::BlockScaleBytes(w);
}

absl::StatusOr<StepCost> CostOf(const RandomModel& model, const PatchSet& patches) {
  StepCost cost;
  std::vector<std::set<int32_t>> chosen(static_cast<size_t>(model.config().num_hidden_layers));
  model::Tap tap;
  tap.on_tensor = [&](const model::TapTensor& tensor) {
    if (tensor.name != "router_ids") return;
    const auto* ids = static_cast<const int32_t*>(tensor.values);
    const int64_t count = tensor.shape[0] * tensor.shape[1];
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] >= 0) chosen[static_cast<size_t>(tensor.layer)].insert(ids[i]);
    }
  };
  model::ForwardBatch batch = model.batch();
  batch.tap = &tap;
  kernels::Exec exec = model.exec();
  exec.patches = &patches;
  ISTHMUS_RETURN_IF_ERROR(model.forward().Enqueue(batch, model.inputs(), exec));
  ISTHMUS_RETURN_IF_ERROR(model.device().stream().Synchronise());
  const model::ModelViews& views = model.weights().views();
  for (size_t i = 0; i < views.layers.size(); ++i) {
    model::LayerWeights layer = views.layers[i];
    const auto touched = static_cast<int64_t>(chosen[i].size());
    cost.touched_experts.push_back(touched);
    cost.routed_bytes += touched * ExpertBytes(layer.experts[0]);
    layer.experts.clear();
    ByteSum sum;
    model::VisitLayer(layer, sum);
    cost.other_weight_bytes += sum.bytes();
    const int64_t context = model.batch().sequences[0].start_position + 1;
    cost.cache_bytes += static_cast<int64_t>(model.batch().sequences.size()) *
                        CacheBytes(model.layout(), model.config(), layer.ratio, context);
  }
  cost.other_weight_bytes += StoredBytes(views.head) + StoredBytes(views.hc_head.fn);
  return cost;
}

}  // namespace isthmus::diag
