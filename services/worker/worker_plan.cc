// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker_plan.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "services/base/byte_size.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"
#include "services/model/device_context.h"
#include "services/model/forward.h"
#include "services/model/step_memory.h"
#include "services/model/weights.h"

namespace isthmus::worker {
namespace {

absl::StatusOr<ModelShape> ReadCheckpointShape(const WorkerConfig& config) {
  if (config.checkpoint.empty()) {
    return absl::InvalidArgumentError("checkpoint: no directory is given");
  }
  ISTHMUS_ASSIGN_OR_RETURN(model::ModelConfig model, model::LoadModelConfig(config.checkpoint));
  ModelShape shape;
  shape.config = model;
  if (config.index_topk > 0) model.index_topk = config.index_topk;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int> devices, DevicesOf(config));
  const int device = devices.empty() ? -1 : devices[0];
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::WeightFormat experts,
                           model::StoredExpertFormat(config.checkpoint, model));
  const kernels::Arithmetic arithmetic = ArithmeticOf(config);
  ISTHMUS_ASSIGN_OR_RETURN(const std::optional<kernels::EntryFormat> keys,
                           IndexKeyFormatOf(config));
  ISTHMUS_ASSIGN_OR_RETURN(shape.layout, kernels::KvLayout::Create(model::GeometryOf(
                                             model, arithmetic, config.page_tokens, keys)));
  shape.max_positions = model.max_position_embeddings;
  const absl::StatusOr<int64_t> weight_bytes = model::WeightBytes(model, experts, config.tp);
  if (!weight_bytes.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("tp: ", weight_bytes.status().message()));
  }
  shape.weight_bytes = *weight_bytes;
  // On the CPU what is larger stays in its files and goes through the page cache.
  if (device < 0 && shape.weight_bytes > model::WeightOptions().packed_limit_bytes) {
    shape.weight_bytes = 0;
  }
  int64_t longest = shape.max_positions;
  if (config.max_sequence_tokens > 0) longest = std::min(longest, config.max_sequence_tokens);
  if (config.memory == "0") longest = std::min(longest, config.cache_tokens);
  shape.is_on_device = device >= 0;
  if (shape.is_on_device) {
    shape.step_bytes =
        model::DeviceScratchBound(model, {.rows = config.max_batch_tokens + config.max_sequences,
                                          .sequences = config.max_sequences,
                                          .max_tokens = longest,
                                          .threads = NumThreads(config)});
    return shape;
  }
  const engine::StepMemory step =
      engine::PlanStepMemory(model, config.max_batch_tokens, config.max_sequences, longest,
                             NumThreads(config), arithmetic);
  shape.step_bytes = step.bytes();
  shape.scratch_bytes = step.scratch_bytes;
  return shape;
}

}  // namespace

absl::StatusOr<std::vector<int>> DevicesOf(const WorkerConfig& config) {
  if (config.tp > 1) return model::ParseDevices(config.device, config.tp);
  ISTHMUS_ASSIGN_OR_RETURN(const int device, model::ParseDevice(config.device));
  return device < 0 ? std::vector<int>() : std::vector<int>{device};
}

model::ScriptedOptions ScriptedOptionsOf(const WorkerConfig& config) {
  model::ScriptedOptions options;
  options.seed = static_cast<uint64_t>(config.scripted_seed);
  options.vocab_size = config.scripted_vocab_size;
  options.end_token_id = config.scripted_end_token_id;
  options.max_positions = config.scripted_max_positions;
  options.page_tokens = config.page_tokens;
  options.layer_pairs = config.scripted_layer_pairs;
  options.end_probability = config.scripted_end_probability;
  options.max_tokens_per_step = config.scripted_max_tokens_per_step;
  options.step_time = config.scripted_step_time;
  options.prefill_token_time = config.scripted_prefill_token_time;
  return options;
}

kernels::Arithmetic ArithmeticOf(const WorkerConfig& config) {
  return config.arithmetic == "math" ? kernels::Arithmetic::kMath : kernels::Arithmetic::kReference;
}

absl::StatusOr<std::optional<kernels::EntryFormat>> IndexKeyFormatOf(const WorkerConfig& config) {
  auto format = kernels::ParseIndexKeyFormat(config.index_key_format, ArithmeticOf(config));
  if (format.ok()) return format;
  return absl::InvalidArgumentError(
      absl::StrCat("model.index_key_format: ", format.status().message()));
}

int NumThreads(const WorkerConfig& config) {
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  return config.threads > 0 ? config.threads : std::clamp(processors, 1, 64);
}

absl::StatusOr<ModelShape> ReadModelShape(const WorkerConfig& config) {
  if (config.model_kind != "scripted") return ReadCheckpointShape(config);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<model::ScriptedForward> script,
                           model::ScriptedForward::Create(ScriptedOptionsOf(config), RealClock()));
  ModelShape shape;
  shape.layout = script->layout();
  shape.max_positions = script->max_positions();
  return shape;
}

absl::StatusOr<engine::MemoryPlan> PlanWorker(const WorkerConfig& config, const ModelShape& shape) {
  engine::MemoryNeeds needs;
  const absl::StatusOr<int64_t> memory = ParseByteSize(config.memory);
  if (!memory.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("memory: ", memory.status().message()));
  }
  needs.memory_bytes = *memory;
  needs.weight_bytes = shape.weight_bytes;
  needs.step_bytes = shape.step_bytes;
  needs.max_sequences = config.max_sequences;
  needs.snapshots = config.prefix_snapshots;
  if (needs.snapshots > 0) needs.host_store_bytes = config.prefix_host_bytes;
  needs.pages_are_on_device = shape.is_on_device;
  needs.chunk_tokens = config.chunk_tokens;
  needs.max_positions = shape.max_positions;
  needs.max_sequence_tokens = config.max_sequence_tokens;
  needs.cache_tokens = config.cache_tokens;
  return engine::PlanMemory(shape.layout, needs);
}

}  // namespace isthmus::worker
