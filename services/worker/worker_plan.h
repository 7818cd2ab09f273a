// SPDX-License-Identifier: Apache-2.0
// A worker's configuration and its model's shape as a memory plan, before weights are read.
#pragma once

#include <optional>

#include "absl/status/statusor.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/kv_layout.h"
#include "services/engine/memory_plan.h"
#include "services/model/model_config.h"
#include "services/model/scripted_forward.h"
#include "services/worker/worker_config.h"

namespace isthmus::worker {

// What the plan depends on of the model.
struct ModelShape {
  kernels::KvLayout layout = {};
  int64_t max_positions = 0;
  bool is_on_device = false;
  std::optional<model::ModelConfig> config = std::nullopt;  // Of a checkpoint, as its file says.
  int64_t weight_bytes = 0;  // In the memory that is planned: 0 where they stay in their files.
  int64_t step_bytes = 0;
  int64_t scratch_bytes = 0;  // Of them, what the workspace reserves; 0: it grows as steps need it.
};

// Of config.json in config.checkpoint, and of the headers of the shards where there are any; or of
// the script. NotFound: there is no config.json. InvalidArgument: as ParseModelConfig, or the
// configuration names the field.
absl::StatusOr<ModelShape> ReadModelShape(const WorkerConfig& config);

// The plan of a worker: InvalidArgument as engine::PlanMemory, and for a `memory` that is no size.
absl::StatusOr<engine::MemoryPlan> PlanWorker(const WorkerConfig& config, const ModelShape& shape);

model::ScriptedOptions ScriptedOptionsOf(const WorkerConfig& config);

// The GPUs that the model runs on, one per rank; empty: the CPU. InvalidArgument: config.device
// names no devices, or another number of them than config.tp.
absl::StatusOr<std::vector<int>> DevicesOf(const WorkerConfig& config);

kernels::Arithmetic ArithmeticOf(const WorkerConfig& config);

// Of model.index_key_format; unset: the arithmetic's own. InvalidArgument, with the field's name:
// the arithmetic does not store that one.
absl::StatusOr<std::optional<kernels::EntryFormat>> IndexKeyFormatOf(const WorkerConfig& config);

// Threads of the kernels: as configured, or one per processor, 64 at most.
int NumThreads(const WorkerConfig& config);

}  // namespace isthmus::worker
