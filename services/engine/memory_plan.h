// SPDX-License-Identifier: Apache-2.0
// How much memory a worker takes, computed from geometry before anything is allocated: what every
// pool of the cache has, and what lies beside them. Pure arithmetic, checked: contexts of millions
// of tokens either fit 63 bits or are refused.
//
// What grows with a sequence is paged, and counted per token of the cache. What does not (windows,
// compressor rows) is counted per sequence, never per token of a batch, and a limit on how much may
// be in flight is counted once, never per sequence: engines that did either offered a tenth of the
// context that they had memory for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/kv_layout.h"
#include "services/model/model_config.h"

namespace isthmus::engine {

// What a worker's largest step takes beside the cache, and what sequences keep for their draws, on
// the CPU.
struct StepMemory {
  int64_t scratch_bytes = 0;  // What the workspace of steps and draws reserves.
  int64_t logit_bytes = 0;    // Of replies, and of prompts whose log probabilities are wanted.
  int64_t count_bytes = 0;    // At most: tokens counted for penalties, of every sequence.

  int64_t bytes() const { return scratch_bytes + logit_bytes + count_bytes; }
};

// `chunk_rows`: what all prompts get in one step.
StepMemory PlanStepMemory(const model::ModelConfig& config, int64_t chunk_rows,
                          int64_t max_sequences, int64_t max_sequence_tokens, int threads,
                          kernels::Arithmetic arithmetic);

// What a plan is made for. The names of fields in errors are those of the worker's configuration.
struct MemoryNeeds {
  int64_t weight_bytes = 0;
  int64_t step_bytes = 0;  // Of the largest step (StepMemory).
  int64_t max_sequences = 1;
  int64_t snapshots = 0;  // Of prefixes.
  // Host memory for evicted prefixes. Where pages lie on a device it is planned beside the rest.
  int64_t host_store_bytes = 0;
  bool pages_are_on_device = false;
  int64_t chunk_tokens = 1;
  int64_t max_positions = 1;        // The model's.
  int64_t max_sequence_tokens = 0;  // 0: as many as the cache and the model have room for.
  // Either the tokens that pages have room for, or, where not 0, the memory of which pages get what
  // all else leaves.
  int64_t cache_tokens = 0;
  int64_t memory_bytes = 0;
};

// One pool: pages of a paged kind, or slots of a fixed size.
struct PlannedPool {
  std::string name;              // As the pool's own in errors: "csa_kv", "state_slot".
  int64_t entries = 0;           // Pages or slots.
  int64_t entry_bytes = 0;       // Of one page or slot.
  int64_t tokens_per_entry = 0;  // 0: does not grow with a sequence.
  int64_t bytes = 0;             // Of the pool.

  // What one token of one sequence takes; 0 when it takes nothing.
  double bytes_per_token() const;
};

struct MemoryPlan {
  std::vector<PlannedPool> pools;  // In the order of the layout's kinds, then slots.
  int64_t cache_tokens = 0;        // That the pages have room for.
  int64_t max_sequences = 0;
  int64_t snapshots = 0;
  int64_t max_sequence_tokens = 0;  // Of one sequence, prompt and output.
  int64_t weight_bytes = 0;
  int64_t step_bytes = 0;
  int64_t pool_bytes = 0;        // Of all pools.
  int64_t host_store_bytes = 0;  // At most: it fills as prefixes are evicted.
  int64_t total_bytes = 0;       // Of the memory that pages lie in.
  int64_t memory_bytes = 0;      // As given.
  std::string index_key_format;  // Of the layout.

  // Of all paged pools together.
  double bytes_per_token() const;
  // Bytes of pages and of one slot that a sequence of `num_tokens` tokens holds.
  int64_t SequenceBytes(int64_t num_tokens) const;
};

// InvalidArgument, with the numbers and what to change: pages that cannot hold one chunk or one
// sequence of max_sequence_tokens, memory that does not reach, sizes that 63 bits cannot hold.
//
// One chunk is what makes progress possible: whoever waits for pages gets them when others have
// ended or were preempted, so no pool needs room for a chunk of everybody at once. Its window lies
// in the state slot, which every sequence holds from its first token on.
absl::StatusOr<MemoryPlan> PlanMemory(const kernels::KvLayout& layout, const MemoryNeeds& needs);

// A JSON object: "pools" with pool, entries, entry_bytes, tokens_per_entry, bytes, bytes_per_token
// each; then the fields above. Ends in a newline.
std::string MemoryPlanJson(const MemoryPlan& plan);

}  // namespace isthmus::engine
