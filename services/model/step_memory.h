// SPDX-License-Identifier: Apache-2.0
// What a model needs of memory beside its cache, from its shape alone: for planning, before a byte
// of the weights is read.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "kernels/core/arithmetic.h"
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
  int64_t sequences = 0;   // That they belong to.
  int64_t logit_rows = 0;  // Of them, whose logits are wanted.
  int64_t max_tokens = 0;  // Of one sequence, with its cache.
  int threads = 1;
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kReference;
};

// Scratch memory that such a step takes on the CPU: the sum of what its operations count, in the
// order of the forward pass, and so what a workspace reserves. No step of at most that size takes
// more; the largest takes this much but for what depends on how rows are cut into sequences and on
// the experts that tokens choose, which is assumed to fall as badly as it can.
int64_t StepScratchBytes(const ModelConfig& config, const StepSize& step);

// An upper bound of the same on a GPU, whose operations keep no such count: what the CPU's take
// with their rows packed, eight times, since blocks that were too small stay unused.
int64_t DeviceScratchBound(const ModelConfig& config, const StepSize& step);

}  // namespace isthmus::model
