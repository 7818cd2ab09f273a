// SPDX-License-Identifier: Apache-2.0
// The engine's step: some tokens of some sequences through the forward pass, then one sampled token
// for every sequence whose known tokens are all in its cache. Used by both kinds of worker and by
// the tools. Called by one thread; it starts none.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "kernels/core/exec.h"
#include "kernels/core/workspace.h"
#include "services/engine/sampler.h"
#include "services/engine/scheduler.h"
#include "services/engine/sequence.h"
#include "services/kv/sequence_cache.h"
#include "services/model/forward.h"

namespace isthmus::engine {

struct EngineOptions {
  int64_t chunk_tokens = 512;  // Most prompt tokens of one sequence in one step.
  // Most prompt tokens of all sequences in one step.
  int64_t max_batch_tokens = std::numeric_limits<int64_t>::max();
  int32_t eos_token_id = 1;
};

class Engine {
 public:
  // `forward`, `pool` and the threads of `exec` must outlive the engine. With the Exec of a GPU the
  // forward pass and the pages are there; tokens that it does not draw itself (model::RowDraw) are
  // sampled on the host.
  Engine(model::Forward* forward, kv::CachePool* pool, const EngineOptions& options,
         const kernels::Exec& exec);

  // A sequence for `prompt`, with an open cache that has room for the prompt and one token, and
  // that holds already what is known of the prompt under `cache_salt` (prefix_reuse.h).
  // InvalidArgument names the bad field with its value and limit: an empty prompt, an unknown
  // token id, a prompt that leaves no room for output, sampling values out of range.
  // ResourceExhausted: no pages or no state slot.
  absl::StatusOr<Sequence> Admit(std::string request_id, std::vector<int32_t> prompt,
                                 const SamplingParams& sampling, std::string cache_salt = {});

  // The checks of Admit alone: what a router or a decode worker can refuse early.
  absl::Status Validate(std::span<const int32_t> prompt, const SamplingParams& sampling) const;

  // How the reply ends with `token` as its output token number `index` (sampler.h).
  FinishReason FinishWith(const Sequence& sequence, int32_t token, int64_t index) const {
    return engine::FinishWith(sequence, token, index, SamplerModelOf());
  }

  // One step of what PlanStep (scheduler.h) chooses of `sequences`. A sequence that is then caught
  // up gains one token, or several when the forward pass drafts them, and may be finished: the end
  // token and max_tokens cut what it gains. Finished sequences must not be given. On an error no
  // sequence has advanced; scope device: no later step can succeed either.
  absl::Status Step(std::span<Sequence* const> sequences);

  const EngineOptions& options() const { return options_; }
  kv::CachePool& pool() { return *pool_; }
  model::Forward& forward() { return *forward_; }

 private:
  struct Pass;  // One forward pass of a step and what it yields.

  absl::Status TakeLogits(int64_t count);
  absl::Status ScopeOf(absl::Status status) const;
  absl::Status Gather(std::span<const StepPart> parts, Pass& pass);
  static void GatherPromptRows(Sequence& sequence, int64_t first_row, int64_t count, Pass& pass);
  absl::Status Sample(Pass& pass);
  SamplerModel SamplerModelOf() const;
  void Commit(Pass& pass, uint64_t step);
  int64_t AcceptedLimit(const Sequence& sequence, int64_t num_cached) const;

  model::Forward* forward_;
  kv::CachePool* pool_;
  const EngineOptions options_;
  kernels::Workspace workspace_;
  kernels::Exec exec_;
  kernels::Exec sampling_exec_;
  // [sequences of the step, vocab]: in pinned memory when a GPU writes them.
  float* logits_ = nullptr;
  std::vector<float> host_logits_;
  kernels::PinnedBuffer pinned_logits_;
  uint64_t num_steps_ = 0;
};

}  // namespace isthmus::engine
