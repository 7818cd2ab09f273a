// SPDX-License-Identifier: Apache-2.0
// The weights of a model, or of one rank's share of it, in the memory of a GPU: matrices as tensor
// cores read them (kernels/core/weight_tiles.h), vectors as f32, the embedding row by row. One
// allocation per layer and one for the rest, of the exact size, made before the first step.
// NVFP4 matrices that are lossless casts of MXFP4 are held as kMxfp4.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "kernels/core/exec.h"
#include "services/base/thread_pool.h"
#include "services/model/shard_plan.h"
#include "services/model/weights.h"

namespace isthmus::model {

class DeviceWeights {
 public:
  // Uploads to the calling thread's device; with a `plan`, that rank's share, cut layer by layer.
  // `threads` (may be null) bring matrices into tiles. Of every matrix a sample is read back and
  // unpacked. `whole` is needed no longer afterwards, but for its config.
  //
  // InvalidArgument: a matrix is not kRowMajor (load with WeightOptions::kMapped).
  // ResourceExhausted: device memory. DataLoss: what was read back differs.
  static absl::StatusOr<std::unique_ptr<DeviceWeights>> Upload(const Weights& whole,
                                                               const ShardPlan* plan,
                                                               ThreadPool* threads);

  // Random weights of a model's shapes, made on the device: for measuring speed without a
  // checkpoint. Activations stay finite; routing is about uniform. `routed` is the format of the
  // routed experts, kMxfp4 or kNvfp4; all else is as in the published checkpoint.
  static absl::StatusOr<std::unique_ptr<DeviceWeights>> Random(const ModelConfig& config,
                                                               const ShardPlan& plan,
                                                               kernels::WeightFormat routed,
                                                               uint64_t seed,
                                                               const kernels::Exec& exec);

  // Valid as long as this object.
  const ModelViews& views() const { return views_; }
  const ModelConfig& config() const { return *config_; }
  int64_t bytes() const;

 private:
  DeviceWeights() = default;

  std::unique_ptr<ModelConfig> config_;
  std::vector<LayerWeights> layers_;
  std::vector<kernels::DeviceBuffer> buffers_;
  ModelViews views_;
};

}  // namespace isthmus::model
