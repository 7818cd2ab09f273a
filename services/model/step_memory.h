// SPDX-License-Identifier: Apache-2.0
// What a model needs of memory beside its cache, from its shape alone: for planning, before a byte
// of the weights is read.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/core/weight.h"
#include "services/model/model_config.h"

namespace isthmus::model {

// Bytes of the weights at their stored width that the fullest of `ranks` ranks holds
// (shard_plan.h). The draft stages, which are not executed, are left out. InvalidArgument as of
// PlanShard.
absl::StatusOr<int64_t> WeightBytes(const ModelConfig& config, kernels::WeightFormat experts,
                                    int ranks = 1);

// How the routed experts of a checkpoint are stored: by the headers of its shards where there are
// any, else by quantization_config of config.json, whose default is MXFP4.
absl::StatusOr<kernels::WeightFormat> StoredExpertFormat(const std::string& checkpoint_dir,
                                                         const ModelConfig& config);

// The largest step that an engine runs.
struct StepSize {
  int64_t rows = 0;        // Tokens of all sequences.
  int64_t sequences = 0;   // Of which so many end in logits.
  int64_t max_tokens = 0;  // Of one sequence, with its cache.
  int threads = 1;
};

// Bytes that the scratch memory of such steps grows to, and the logits: an upper bound. It is
// derived from what the CPU's operations take and held against them in a test; a GPU's take less
// per row, as they pack no rows.
int64_t StepBytes(const ModelConfig& config, const StepSize& step);

}  // namespace isthmus::model
