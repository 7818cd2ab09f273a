// SPDX-License-Identifier: Apache-2.0
#include "services/model/sharded_weights.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"
#include "services/model/weight_slice.h"

namespace isthmus::model {
namespace {

using kernels::WeightLayout;
using kernels::WeightView;

absl::StatusOr<WeightView> Cut(absl::string_view name, const WeightView& w, const Range& rows,
                               const Range& cols, WeightStorage* storage) {
  if (w.layout != WeightLayout::kRowMajor) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard: ", name, " has layout ", static_cast<int>(w.layout), ", expected ",
                     static_cast<int>(WeightLayout::kRowMajor), " (mapped weights)"));
  }
  if (rows.end() > w.rows || cols.end() > w.cols) {
    return absl::InvalidArgumentError(absl::StrCat("shard: ", name, " is [", w.rows, ", ", w.cols,
                                                   "], the plan ends at [", rows.end(), ", ",
                                                   cols.end(), "]"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(uint8_t* const elements,
                           storage->Take(SliceElementBytes(w, rows, cols)));
  ISTHMUS_ASSIGN_OR_RETURN(uint8_t* const scales, storage->Take(SliceScaleBytes(w, rows, cols)));
  return CopySlice(w, rows, cols, elements, scales);
}

absl::StatusOr<WeightView> CutRows(absl::string_view name, const WeightView& w, const Range& rows,
                                   WeightStorage* storage) {
  return Cut(name, w, rows, {0, w.cols}, storage);
}

absl::StatusOr<WeightView> CutColumns(absl::string_view name, const WeightView& w,
                                      const Range& cols, WeightStorage* storage) {
  return Cut(name, w, {0, w.rows}, cols, storage);
}

absl::StatusOr<kernels::ExpertWeights> CutExpert(const kernels::ExpertWeights& whole,
                                                 const Range& intermediate,
                                                 WeightStorage* storage) {
  kernels::ExpertWeights part;
  ISTHMUS_ASSIGN_OR_RETURN(part.w1, CutRows("w1", whole.w1, intermediate, storage));
  ISTHMUS_ASSIGN_OR_RETURN(part.w3, CutRows("w3", whole.w3, intermediate, storage));
  ISTHMUS_ASSIGN_OR_RETURN(part.w2, CutColumns("w2", whole.w2, intermediate, storage));
  return part;
}

}  // namespace

absl::StatusOr<LayerWeights> ShardLayer(const ModelConfig& config, const LayerWeights& whole,
                                        const ShardPlan& plan, WeightStorage* storage) {
  LayerWeights part = whole;
  part.attn_sink = kernels::F32Vector(whole.attn_sink.f32() + plan.heads.first, plan.heads.count);
  ISTHMUS_ASSIGN_OR_RETURN(part.wq_b, CutRows("wq_b", whole.wq_b, plan.query_rows, storage));
  part.wo_a.clear();
  for (int64_t g = plan.groups.first; g < plan.groups.end(); ++g) {
    const WeightView& group = whole.wo_a[static_cast<size_t>(g)];
    ISTHMUS_ASSIGN_OR_RETURN(WeightView copy,
                             CutRows("wo_a", group, {0, config.o_lora_rank}, storage));
    part.wo_a.push_back(copy);
  }
  ISTHMUS_ASSIGN_OR_RETURN(part.wo_b, CutColumns("wo_b", whole.wo_b, plan.output_columns, storage));
  for (kernels::ExpertWeights& expert : part.experts) {
    ISTHMUS_ASSIGN_OR_RETURN(expert, CutExpert(expert, plan.intermediate, storage));
  }
  ISTHMUS_ASSIGN_OR_RETURN(part.shared, CutExpert(whole.shared, plan.intermediate, storage));
  return part;
}

absl::StatusOr<WeightView> ShardHead(const WeightView& head, const ShardPlan& plan,
                                     WeightStorage* storage) {
  return CutRows("head", head, plan.vocabulary, storage);
}

absl::StatusOr<std::unique_ptr<ShardedWeights>> ShardedWeights::Create(const Weights* whole,
                                                                       const ShardPlan& plan,
                                                                       ThreadPool* threads) {
  std::unique_ptr<ShardedWeights> out(new ShardedWeights(whole, plan));
  const auto layers = static_cast<size_t>(whole->config().num_hidden_layers);
  for (size_t i = 0; i <= layers; ++i) out->storage_.push_back(std::make_unique<WeightStorage>());
  out->layers_.resize(layers);
  std::vector<absl::Status> statuses(layers);
  const auto body = [&](int64_t begin, int64_t end, int) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      absl::StatusOr<LayerWeights> layer = ShardLayer(
          whole->config(), whole->layer(static_cast<int>(i)), plan, out->storage_[i].get());
      statuses[i] = layer.status();
      if (layer.ok()) out->layers_[i] = *std::move(layer);
    }
  };
  if (threads != nullptr) {
    threads->ParallelFor(static_cast<int64_t>(layers), /*grain=*/1, body);
  } else {
    body(0, static_cast<int64_t>(layers), 0);
  }
  for (const absl::Status& status : statuses) ISTHMUS_RETURN_IF_ERROR(status);
  ISTHMUS_ASSIGN_OR_RETURN(out->head_, ShardHead(whole->head(), plan, out->storage_.back().get()));
  return out;
}

const LayerWeights& ShardedWeights::layer(int layer) const {
  ISTHMUS_CHECK(layer >= 0 && layer < static_cast<int>(layers_.size()));
  return layers_[static_cast<size_t>(layer)];
}

ModelViews ShardedWeights::views() const {
  ModelViews out = whole_->views();
  out.head = head_;
  out.layers = layers_;
  return out;
}

int64_t ShardedWeights::copied_bytes() const {
  int64_t sum = 0;
  for (const auto& storage : storage_) sum += storage->taken_bytes();
  return sum;
}

}  // namespace isthmus::model
