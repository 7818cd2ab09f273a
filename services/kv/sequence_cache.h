// SPDX-License-Identifier: Apache-2.0
// All cached state of one sequence as one object, and the pools it comes from. Whoever moves,
// saves or resets a sequence handles this object, so no part of it can be forgotten
// (model specification 4.4, 4.5, 10.6).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/kv_layout.h"
#include "services/base/mutex.h"
#include "services/kv/page_pool.h"
#include "services/kv/prefix_index.h"

namespace isthmus::kv {

class CachePool;

// Pages of every paged kind and the state slot of one sequence. Move-only; gives everything back
// to its pool when it dies. Must not outlive the pool.
class SequenceCache {
 public:
  SequenceCache() = default;
  SequenceCache(SequenceCache&& other) noexcept;
  SequenceCache& operator=(SequenceCache&& other) noexcept;
  ~SequenceCache();

  bool is_open() const { return pool_ != nullptr; }

  // Tokens whose entries and rows are in the cache.
  int64_t num_tokens() const { return num_tokens_; }
  // Tokens that the held pages have room for.
  int64_t capacity_tokens() const { return capacity_tokens_; }

  // Page indices of one paged kind, in token order.
  std::span<const int32_t> pages(kernels::CacheKindIndex kind) const { return pages_[kind]; }
  int32_t slot() const { return slot_; }

  // Room for `num_tokens` tokens in every paged kind, all or nothing; ResourceExhausted otherwise.
  // Pages that the prefix index alone holds are evicted for it.
  absl::Status Reserve(int64_t num_tokens);

  // Begins an empty sequence with what was found. Full pages are shared and never written; a page
  // that the hit ends inside is copied. With a snapshot the cache holds hit.num_tokens tokens
  // afterwards; without one it has their pages and no tokens, since the state comes from elsewhere.
  // On an error it is empty again. ResourceExhausted: no page for the copy.
  absl::Status Adopt(PrefixHit hit);

  // The same of what was found with host memory's help, which is copied into pages of its own.
  // DataLoss: bytes of host memory are not what they were.
  absl::Status AdoptHost(const HostHit& hit, PrefixHit pages);

  // Makes `fork`, an open cache of the same pool without tokens, a copy of this one, for another
  // sequence with the same start. Full pages are shared from now on and never written; the page
  // that is filled in part and the state slot are copied. Pages that `fork` has reserved before
  // come behind the shared ones. On an error `fork` is empty. ResourceExhausted: no page for the
  // copy.
  absl::Status ForkInto(SequenceCache& fork);

  // Tokens, from the start, whose pages may have other holders: they are never written.
  int64_t num_shared_tokens() const { return num_shared_tokens_; }

  // Page indices of all paged kinds.
  PrefixIndex::PageLists page_lists() const;

  // Says that the cache now holds `num_tokens` tokens: after a step, or after a transfer filled it.
  // InvalidArgument beyond the capacity.
  absl::Status SetNumTokens(int64_t num_tokens);

  // The view for kernels: `num_rows` new tokens from num_tokens() on, rows from `first_row` of the
  // batch. The capacity must suffice and no shared page be among those to write (checked).
  kernels::SequenceKv View(int64_t first_row, int64_t num_rows) const;

  // Back to zero tokens: the pages are given back and the state slot is cleared.
  void Reset();

 private:
  friend class CachePool;
  void Close();
  void AddPage(int kind, int32_t page);
  absl::Status CopyEnd(const PrefixHit& hit);
  absl::Status CopyBehind(int64_t num_full, SequenceCache& fork) const;

  CachePool* pool_ = nullptr;
  int32_t slot_ = -1;
  int64_t num_tokens_ = 0;
  int64_t capacity_tokens_ = 0;
  int64_t num_shared_tokens_ = 0;
  std::array<std::vector<int32_t>, kernels::kNumPagedKinds> pages_;
  std::array<std::vector<std::byte*>, kernels::kNumPagedKinds> addresses_;
};

// Every pool of one device, sized for a number of tokens and of sequences. Thread-safe.
class CachePool {
 public:
  // Pages for `num_tokens` tokens in all and state slots for `num_sequences` sequences. A kind
  // that no layer has gets no pages. `device`, `replicas`: as in page_pool.h. `prefixes`: besides,
  // a prefix index with its snapshots. InvalidArgument names the option that is out of range.
  static absl::StatusOr<std::unique_ptr<CachePool>> Create(const kernels::KvLayout& layout,
                                                           int64_t num_tokens,
                                                           int32_t num_sequences,
                                                           int device = kHostMemory,
                                                           const PrefixOptions& prefixes = {},
                                                           std::span<const int> replicas = {});

  // An empty sequence with a cleared state slot; ResourceExhausted when no slot is free.
  absl::StatusOr<SequenceCache> Open();

  const kernels::KvLayout& layout() const { return layout_; }
  // The GPU that the pages lie on, or kHostMemory.
  int device() const { return slots_->arena().device(); }
  PagePool& pages(kernels::CacheKindIndex kind) { return *pages_[kind]; }
  PagedPools paged_pools() const;
  // State slots are pages of a pool of their own: page index = slot, page_bytes = slot bytes.
  PagePool& slots() { return *slots_; }

  // Null when there is none.
  PrefixIndex* prefixes() { return prefixes_.get(); }
  const PrefixIndex* prefixes() const { return prefixes_.get(); }

  // A copy of a sequence's state, which stands at the end of a block, for PrefixIndex::AddSnapshot.
  // ResourceExhausted: every snapshot is being copied.
  absl::StatusOr<HeldPage> TakeSnapshot(const SequenceCache& cache);

  // Checks every pool (page_pool.h) and the prefix index.
  void CheckConservation() const;

 private:
  using Pages = std::array<std::vector<int32_t>, kernels::kNumPagedKinds>;
  friend class SequenceCache;

  explicit CachePool(const kernels::KvLayout& layout) : layout_(layout) {}
  absl::Status CreatePrefixes(const PrefixOptions& options, int64_t num_tokens,
                              std::span<const int> replicas);
  absl::StatusOr<Pages> Take(const std::array<int64_t, kernels::kNumPagedKinds>& counts);
  absl::StatusOr<bool> HasFree(const std::array<int64_t, kernels::kNumPagedKinds>& counts) const;
  absl::StatusOr<Pages> TakeFree(const std::array<int64_t, kernels::kNumPagedKinds>& counts);

  const kernels::KvLayout layout_;
  std::array<std::unique_ptr<PagePool>, kernels::kNumPagedKinds> pages_;
  std::unique_ptr<PagePool> slots_;
  std::unique_ptr<PagePool> snapshots_;
  std::unique_ptr<PrefixIndex> prefixes_;  // After the pools, which it gives pages back to.
  Mutex take_mutex_;                       // Whoever takes, from seeing what is there to having it.
};

}  // namespace isthmus::kv
