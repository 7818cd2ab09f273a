// SPDX-License-Identifier: Apache-2.0
// A model with random weights and full caches on a GPU, ready for a step: what the measurements of
// this folder stand on.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/kv/sequence_cache.h"
#include "services/model/device_context.h"
#include "services/model/device_steps.h"
#include "services/model/device_weights.h"
#include "services/model/forward.h"

namespace isthmus::diag {

struct RandomModelOptions {
  model::ModelConfig config;
  int ranks = 1;  // The share of one of so many.
  int rank = 0;
  // Its end of the group; null: the share runs alone, without communication.
  const kernels::Communicator* communicator = nullptr;
  kernels::WeightFormat routed = kernels::WeightFormat::kNvfp4;
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kReference;
  int64_t batch = 1;
  int64_t context = 4096;  // Tokens that every sequence has cached.
  int64_t rows = 1;        // New tokens of each sequence: one in decode, more in prefill.
  // Of index keys; unset: the arithmetic's.
  std::optional<kernels::EntryFormat> index_key_format = std::nullopt;
  int page_tokens = 256;
  int device = 0;
};

class RandomModel {
 public:
  static absl::StatusOr<std::unique_ptr<RandomModel>> Create(const RandomModelOptions& options);

  const model::ModelConfig& config() const { return options_.config; }
  const model::ShardPlan& plan() const { return plan_; }
  const model::ModelForward& forward() const { return *forward_; }
  const model::DeviceWeights& weights() const { return *weights_; }
  const model::DeviceContext& device() const { return *device_; }
  // Of the step: of decode with one row a sequence, else of prefill.
  kernels::Exec exec() const;
  const kernels::KvLayout& layout() const { return forward_->layout(); }
  int64_t cache_bytes() const;

  // The inputs of a step of the whole batch, in device memory, and where its logits go.
  const model::ModelForward::StepInputs& inputs() const { return inputs_; }
  // Where the batch's sequences lie, in device memory.
  const kernels::DeviceBatch& device_batch() const { return device_batch_; }
  // The batch as the forward pass takes it, for its tap.
  const model::ForwardBatch& batch() const { return batch_; }

 private:
  explicit RandomModel(const RandomModelOptions& options) : options_(options) {}
  absl::Status FillCaches();
  absl::Status FillPlane(std::byte* base, int64_t planes, int64_t stride,
                         const kernels::EntryPlane& plane, uint64_t seed);
  absl::Status MakeBatch();

  const RandomModelOptions options_;
  model::ShardPlan plan_;
  std::unique_ptr<model::DeviceContext> device_;
  std::unique_ptr<model::DeviceWeights> weights_;
  std::unique_ptr<model::ModelForward> forward_;
  std::unique_ptr<kv::CachePool> pool_;
  std::vector<kv::SequenceCache> caches_;
  std::vector<int32_t> tokens_;
  std::vector<kernels::SequenceKv> sequences_;
  std::vector<int64_t> logit_rows_;
  model::ForwardBatch batch_;
  model::StepStage stage_;
  kernels::DeviceBatch device_batch_;
  kernels::DeviceBuffer logits_;
  model::ModelForward::StepInputs inputs_;
};

// A few layers of every kind, small enough for the emulator.
model::ModelConfig MiniatureConfig(int num_layers);

}  // namespace isthmus::diag
