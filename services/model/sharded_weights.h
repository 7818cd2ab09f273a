// SPDX-License-Identifier: Apache-2.0
// What one rank of a tensor-parallel group computes with: its parts of the weights (shard_plan.h),
// copied out of the whole at their stored width, and views of what every rank holds whole.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/base/thread_pool.h"
#include "services/model/shard_plan.h"
#include "services/model/weight_storage.h"
#include "services/model/weights.h"

namespace isthmus::model {

// The rank's part of one layer; copies lie in `storage`, vectors and whole matrices are views of
// `whole`. For an upload layer by layer: the storage may be dropped once the layer is elsewhere.
//
// InvalidArgument: a matrix to be cut is not kRowMajor (load with WeightOptions::kMapped).
// ResourceExhausted: no memory.
absl::StatusOr<LayerWeights> ShardLayer(const ModelConfig& config, const LayerWeights& whole,
                                        const ShardPlan& plan, WeightStorage* storage);

// The rank's rows of the output head, [vocabulary.count, hidden].
absl::StatusOr<kernels::WeightView> ShardHead(const kernels::WeightView& head,
                                              const ShardPlan& plan, WeightStorage* storage);

// All layers at once. `whole` must outlive it.
class ShardedWeights {
 public:
  // Errors as above; `threads`, when given, copy in parallel and are not kept.
  static absl::StatusOr<std::unique_ptr<ShardedWeights>> Create(const Weights* whole,
                                                                const ShardPlan& plan,
                                                                ThreadPool* threads = nullptr);

  // Of the whole model; shapes of the parts are those of the plan.
  const ModelConfig& config() const { return whole_->config(); }
  const ShardPlan& plan() const { return plan_; }
  const kernels::WeightView& embed() const { return whole_->embed(); }
  const kernels::WeightView& head() const { return head_; }  // [vocabulary.count, hidden]
  const kernels::VectorView& norm() const { return whole_->norm(); }
  const HyperConnectionWeights& hc_head() const { return whole_->hc_head(); }
  // `layer` in [0, num_hidden_layers), checked.
  const LayerWeights& layer(int layer) const;
  // For a ModelForward of this rank; valid as long as this object.
  ModelViews views() const;

  int64_t copied_bytes() const;

 private:
  ShardedWeights(const Weights* whole, const ShardPlan& plan) : whole_(whole), plan_(plan) {}

  const Weights* whole_;
  const ShardPlan plan_;
  kernels::WeightView head_;
  std::vector<LayerWeights> layers_;
  std::vector<std::unique_ptr<WeightStorage>> storage_;  // One per layer, then that of the head.
};

}  // namespace isthmus::model
