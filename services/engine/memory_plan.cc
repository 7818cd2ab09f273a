// SPDX-License-Identifier: Apache-2.0
#include "services/engine/memory_plan.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "services/base/byte_size.h"
#include "services/base/status_macros.h"
#include "services/engine/sampler.h"
#include "services/engine/scheduler.h"
#include "services/kv/page_copy.h"
#include "services/model/step_memory.h"

namespace isthmus::engine {
namespace {

using kernels::CacheKindIndex;
using kernels::kNumPagedKinds;
using kernels::KvLayout;
using kv::SnapshotBytes;

// What a pool can count (kv::PagePool).
constexpr int64_t kMaxEntries = std::numeric_limits<int32_t>::max();

absl::StatusOr<int64_t> Multiply(absl::string_view what, int64_t a, int64_t b) {
  int64_t product = 0;
  if (!__builtin_mul_overflow(a, b, &product)) return product;
  return absl::InvalidArgumentError(
      absl::StrCat("memory plan: ", what, ", ", a, " times ", b, " bytes, do not fit 63 bits"));
}

absl::StatusOr<int64_t> Add(absl::string_view what, int64_t a, int64_t b) {
  int64_t sum = 0;
  if (!__builtin_add_overflow(a, b, &sum)) return sum;
  return absl::InvalidArgumentError(
      absl::StrCat("memory plan: ", what, ", ", a, " and ", b, " bytes, do not fit 63 bits"));
}

absl::Status CheckNeeds(const MemoryNeeds& n) {
  const auto at_least = [](absl::string_view field, int64_t value, int64_t min) {
    if (value >= min) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(field, ": is ", value, ", must be at least ", min));
  };
  ISTHMUS_RETURN_IF_ERROR(at_least("weight_bytes", n.weight_bytes, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("step_bytes", n.step_bytes, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("max_sequences", n.max_sequences, 1));
  ISTHMUS_RETURN_IF_ERROR(at_least("prefix_cache.snapshots", n.snapshots, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("prefix_cache.host_bytes", n.host_store_bytes, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("chunk_tokens", n.chunk_tokens, 1));
  ISTHMUS_RETURN_IF_ERROR(at_least("max_positions", n.max_positions, 1));
  ISTHMUS_RETURN_IF_ERROR(at_least("max_sequence_tokens", n.max_sequence_tokens, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("memory", n.memory_bytes, 0));
  ISTHMUS_RETURN_IF_ERROR(at_least("cache_tokens", n.cache_tokens, n.memory_bytes > 0 ? 0 : 1));
  if (n.max_sequence_tokens > n.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat("max_sequence_tokens: is ",
                                                   n.max_sequence_tokens, ", the model's limit is ",
                                                   n.max_positions));
  }
  return absl::OkStatus();
}

int64_t PagesOf(const KvLayout& layout, int64_t tokens) {
  return tokens / layout.geometry.page_tokens + (tokens % layout.geometry.page_tokens != 0 ? 1 : 0);
}

// One page of every kind that has layers.
int64_t PageBytes(const KvLayout& layout) {
  int64_t bytes = 0;
  for (int k = 0; k < kNumPagedKinds; ++k) bytes += layout.kinds[static_cast<size_t>(k)].bytes();
  return bytes;
}

// Of the memory that pages lie in.
int64_t HostStoreBytes(const MemoryNeeds& needs) {
  return needs.pages_are_on_device ? 0 : needs.host_store_bytes;
}

// All but the pages.
absl::StatusOr<int64_t> FixedBytes(const KvLayout& layout, const MemoryNeeds& needs) {
  ISTHMUS_ASSIGN_OR_RETURN(const int64_t slots,
                           Multiply("max_sequences", needs.max_sequences, layout.state_slot_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(
      const int64_t snapshots,
      Multiply("prefix_cache.snapshots", needs.snapshots, SnapshotBytes(layout)));
  ISTHMUS_ASSIGN_OR_RETURN(int64_t bytes, Add("slots and snapshots", slots, snapshots));
  ISTHMUS_ASSIGN_OR_RETURN(bytes, Add("slots and weights", bytes, needs.weight_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(bytes, Add("slots and host store", bytes, HostStoreBytes(needs)));
  return Add("slots, weights and steps", bytes, needs.step_bytes);
}

// The pages of each kind: those of cache_tokens, or those that the memory leaves room for.
absl::StatusOr<int64_t> CountPages(const KvLayout& layout, const MemoryNeeds& needs) {
  int64_t pages = PagesOf(layout, needs.cache_tokens);
  const int64_t page_bytes = PageBytes(layout);
  if (needs.memory_bytes > 0 && page_bytes > 0) {
    ISTHMUS_ASSIGN_OR_RETURN(const int64_t fixed, FixedBytes(layout, needs));
    pages = std::min(std::max<int64_t>(0, needs.memory_bytes - fixed) / page_bytes, kMaxEntries);
  }
  if (pages <= kMaxEntries) return pages;
  return absl::InvalidArgumentError(absl::StrCat("cache_tokens: ", needs.cache_tokens, " are ",
                                                 pages, " pages of ", layout.geometry.page_tokens,
                                                 " tokens, a pool has at most ", kMaxEntries));
}

// What room for `tokens` tokens takes, and what there is.
absl::Status CheckRoom(const KvLayout& layout, const MemoryNeeds& needs, int64_t pages,
                       absl::string_view what, int64_t tokens, absl::string_view advice) {
  const int64_t wanted = PagesOf(layout, tokens);
  if (pages >= wanted) return absl::OkStatus();
  const std::string pool = absl::StrCat("pool ", layout.kinds[kernels::kCsaKv].name, " has ", pages,
                                        " pages of ", layout.geometry.page_tokens, " tokens, ",
                                        what, " of ", tokens, " tokens needs ", wanted);
  if (needs.memory_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat("cache_tokens: is ", needs.cache_tokens, ", so ",
                                                   pool, ": raise cache_tokens, or ", advice));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const int64_t fixed, FixedBytes(layout, needs));
  ISTHMUS_ASSIGN_OR_RETURN(const int64_t in_pages, Multiply(what, wanted, PageBytes(layout)));
  ISTHMUS_ASSIGN_OR_RETURN(const int64_t least, Add(what, fixed, in_pages));
  return absl::InvalidArgumentError(absl::StrCat(
      "memory: is ", FormatByteSize(needs.memory_bytes), "; weights take ",
      FormatByteSize(needs.weight_bytes), ", steps ", FormatByteSize(needs.step_bytes), ", ",
      HostStoreBytes(needs) > 0
          ? absl::StrCat("evicted prefixes ", FormatByteSize(HostStoreBytes(needs)), ", ")
          : "",
      needs.max_sequences, " state slots of ", layout.state_slot_bytes, " bytes and ",
      needs.snapshots, " snapshots of ", SnapshotBytes(layout), " bytes the rest of ",
      FormatByteSize(fixed), ", so ", pool, ": raise memory to ", FormatByteSize(least), " (",
      least,
      " bytes), or lower max_sequences, prefix_cache.snapshots or prefix_cache.host_bytes, or ",
      advice));
}

absl::Status AddPool(PlannedPool pool, MemoryPlan* plan) {
  ISTHMUS_ASSIGN_OR_RETURN(pool.bytes, Multiply(pool.name, pool.entries, pool.entry_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(plan->pool_bytes, Add(pool.name, plan->pool_bytes, pool.bytes));
  plan->pools.push_back(std::move(pool));
  return absl::OkStatus();
}

}  // namespace

double PlannedPool::bytes_per_token() const {
  return tokens_per_entry == 0
             ? 0.0
             : static_cast<double>(entry_bytes) / static_cast<double>(tokens_per_entry);
}

double MemoryPlan::bytes_per_token() const {
  double sum = 0.0;
  for (const PlannedPool& pool : pools) sum += pool.bytes_per_token();
  return sum;
}

int64_t MemoryPlan::SequenceBytes(int64_t num_tokens) const {
  int64_t bytes = 0;
  for (const PlannedPool& pool : pools) {
    if (pool.name == "state_slot") bytes += pool.entry_bytes;
    if (pool.tokens_per_entry == 0) continue;
    bytes += (num_tokens + pool.tokens_per_entry - 1) / pool.tokens_per_entry * pool.entry_bytes;
  }
  return bytes;
}

StepMemory PlanStepMemory(const model::ModelConfig& config, int64_t chunk_rows,
                          int64_t max_sequences, int64_t max_sequence_tokens, int threads,
                          kernels::Arithmetic arithmetic) {
  model::StepSize step;
  step.rows = chunk_rows + max_sequences;
  step.sequences = max_sequences;
  step.logit_rows = max_sequences + std::min(chunk_rows, kMaxPromptLogitRows);
  step.max_tokens = max_sequence_tokens;
  step.threads = threads;
  step.arithmetic = arithmetic;
  const int64_t vocab = config.vocab_size;
  return {.scratch_bytes =
              std::max(model::StepScratchBytes(config, step), DrawScratchBytes(vocab, threads)),
          .logit_bytes = step.logit_rows * vocab * static_cast<int64_t>(sizeof(float)),
          .count_bytes = max_sequences * TokenCountsBytes(vocab)};
}

absl::StatusOr<MemoryPlan> PlanMemory(const KvLayout& layout, const MemoryNeeds& needs) {
  ISTHMUS_RETURN_IF_ERROR(CheckNeeds(needs));
  ISTHMUS_ASSIGN_OR_RETURN(const int64_t pages, CountPages(layout, needs));
  const int64_t page_tokens = layout.geometry.page_tokens;
  const int64_t longest =
      needs.max_sequence_tokens > 0 ? needs.max_sequence_tokens : needs.max_positions;
  ISTHMUS_RETURN_IF_ERROR(CheckRoom(layout, needs, pages, "one chunk",
                                    std::min(needs.chunk_tokens, longest), "lower chunk_tokens"));
  if (needs.max_sequence_tokens > 0) {
    ISTHMUS_RETURN_IF_ERROR(
        CheckRoom(layout, needs, pages, "one sequence", longest, "lower max_sequence_tokens"));
  }
  MemoryPlan plan;
  plan.max_sequences = needs.max_sequences;
  plan.snapshots = needs.snapshots;
  plan.weight_bytes = needs.weight_bytes;
  plan.step_bytes = needs.step_bytes;
  plan.memory_bytes = needs.memory_bytes;
  plan.host_store_bytes = needs.host_store_bytes;
  plan.index_key_format =
      std::string(kernels::IndexKeyFormatName(layout.kinds[kernels::kIndexKey].format));
  plan.cache_tokens = pages * page_tokens;
  plan.max_sequence_tokens = std::min(longest, plan.cache_tokens);
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const kernels::CacheKind& kind = layout.kinds[static_cast<size_t>(k)];
    ISTHMUS_RETURN_IF_ERROR(AddPool({.name = kind.name,
                                     .entries = kind.layers.empty() ? 0 : pages,
                                     .entry_bytes = kind.bytes(),
                                     .tokens_per_entry = page_tokens},
                                    &plan));
  }
  ISTHMUS_RETURN_IF_ERROR(AddPool({.name = "state_slot",
                                   .entries = needs.max_sequences,
                                   .entry_bytes = layout.state_slot_bytes},
                                  &plan));
  ISTHMUS_RETURN_IF_ERROR(AddPool(
      {.name = "snapshot", .entries = needs.snapshots, .entry_bytes = SnapshotBytes(layout)},
      &plan));
  ISTHMUS_ASSIGN_OR_RETURN(plan.total_bytes,
                           Add("weights and steps", plan.weight_bytes, plan.step_bytes));
  ISTHMUS_ASSIGN_OR_RETURN(plan.total_bytes,
                           Add("the host store", plan.total_bytes, HostStoreBytes(needs)));
  ISTHMUS_ASSIGN_OR_RETURN(plan.total_bytes, Add("everything", plan.total_bytes, plan.pool_bytes));
  return plan;
}

std::string MemoryPlanJson(const MemoryPlan& plan) {
  nlohmann::ordered_json pools = nlohmann::ordered_json::array();
  for (const PlannedPool& pool : plan.pools) {
    pools.push_back({{"pool", pool.name},
                     {"entries", pool.entries},
                     {"entry_bytes", pool.entry_bytes},
                     {"tokens_per_entry", pool.tokens_per_entry},
                     {"bytes", pool.bytes},
                     {"bytes_per_token", pool.bytes_per_token()}});
  }
  const nlohmann::ordered_json json = {{"pools", std::move(pools)},
                                       {"bytes_per_token", plan.bytes_per_token()},
                                       {"cache_tokens", plan.cache_tokens},
                                       {"max_sequences", plan.max_sequences},
                                       {"max_sequence_tokens", plan.max_sequence_tokens},
                                       {"index_key_format", plan.index_key_format},
                                       {"weight_bytes", plan.weight_bytes},
                                       {"step_bytes", plan.step_bytes},
                                       {"pool_bytes", plan.pool_bytes},
                                       {"host_store_bytes", plan.host_store_bytes},
                                       {"total_bytes", plan.total_bytes},
                                       {"memory_bytes", plan.memory_bytes}};
  return json.dump(2) + "\n";
}

}  // namespace isthmus::engine
