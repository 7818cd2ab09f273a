// SPDX-License-Identifier: Apache-2.0
#include "services/kv/sequence_cache.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"
#include "services/kv/page_copy.h"

namespace isthmus::kv {

using kernels::CacheKindIndex;
using kernels::kNumPagedKinds;

SequenceCache::SequenceCache(SequenceCache&& other) noexcept { *this = std::move(other); }

SequenceCache& SequenceCache::operator=(SequenceCache&& other) noexcept {
  if (this == &other) return *this;
  Close();
  pool_ = std::exchange(other.pool_, nullptr);
  slot_ = std::exchange(other.slot_, -1);
  num_tokens_ = std::exchange(other.num_tokens_, 0);
  capacity_tokens_ = std::exchange(other.capacity_tokens_, 0);
  num_shared_tokens_ = std::exchange(other.num_shared_tokens_, 0);
  pages_ = std::exchange(other.pages_, {});
  addresses_ = std::exchange(other.addresses_, {});
  return *this;
}

SequenceCache::~SequenceCache() { Close(); }

void SequenceCache::AddPage(int kind, int32_t page) {
  pages_[static_cast<size_t>(kind)].push_back(page);
  addresses_[static_cast<size_t>(kind)].push_back(
      pool_->pages(static_cast<CacheKindIndex>(kind)).address(page));
}

absl::Status SequenceCache::Reserve(int64_t num_tokens) {
  ISTHMUS_CHECK(is_open());
  if (num_tokens <= capacity_tokens_) return absl::OkStatus();
  std::array<int64_t, kNumPagedKinds> counts{};
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    counts[kind] = std::max<int64_t>(
        0, pool_->layout().PagesFor(kind, num_tokens) - static_cast<int64_t>(pages_[kind].size()));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const CachePool::Pages added, pool_->Take(counts));
  for (int k = 0; k < kNumPagedKinds; ++k) {
    for (const int32_t page : added[static_cast<size_t>(k)]) AddPage(k, page);
  }
  const int64_t page_tokens = pool_->layout().geometry.page_tokens;
  capacity_tokens_ = (num_tokens + page_tokens - 1) / page_tokens * page_tokens;
  return absl::OkStatus();
}

absl::Status SequenceCache::Adopt(PrefixHit hit) {
  ISTHMUS_CHECK(is_open() && capacity_tokens_ == 0);
  const int64_t page_tokens = pool_->layout().geometry.page_tokens;
  const int64_t num_full = hit.num_tokens / page_tokens;
  for (int k = 0; k < kNumPagedKinds; ++k) {
    std::vector<HeldPage>& pages = hit.pages[static_cast<size_t>(k)];
    for (int64_t page = 0; page < num_full && !pages.empty(); ++page) {
      AddPage(k, pages[static_cast<size_t>(page)].Detach());
    }
  }
  capacity_tokens_ = num_full * page_tokens;
  num_shared_tokens_ = capacity_tokens_;
  absl::Status status = CopyEnd(hit);
  if (!status.ok()) {
    Reset();
    return status;
  }
  if (hit.snapshot.is_held()) num_tokens_ = hit.num_tokens;
  return absl::OkStatus();
}

// The part of a page at the end of a hit, and its snapshot.
absl::Status SequenceCache::AdoptHost(const HostHit& hit, PrefixHit pages) {
  int64_t at = pages.num_tokens;
  ISTHMUS_RETURN_IF_ERROR(Adopt(std::move(pages)));
  const auto copy = [&]() -> absl::Status {
    ISTHMUS_RETURN_IF_ERROR(Reserve(hit.num_tokens));
    const kernels::KvLayout& layout = pool_->layout();
    for (const SharedBytes& block : hit.blocks) {
      const auto page = static_cast<size_t>(at / layout.geometry.page_tokens);
      BlockPages targets{};
      for (size_t k = 0; k < targets.size(); ++k) {
        targets[k] = pages_[k].empty() ? -1 : pages_[k][page];
      }
      ISTHMUS_RETURN_IF_ERROR(WriteBlock(layout, pool_->paged_pools(), targets,
                                         at % layout.geometry.page_tokens, *block));
      at += kPrefixBlockTokens;
    }
    return WritePage(pool_->slots(), slot_, *hit.snapshot);
  };
  absl::Status status = copy();
  if (!status.ok()) {
    Reset();
    return status;
  }
  return SetNumTokens(hit.num_tokens);
}

absl::Status SequenceCache::CopyEnd(const PrefixHit& hit) {
  const int64_t rest = hit.num_tokens - capacity_tokens_;
  if (rest > 0) {
    const auto index = static_cast<size_t>(capacity_tokens_ / pool_->layout().geometry.page_tokens);
    ISTHMUS_RETURN_IF_ERROR(Reserve(hit.num_tokens));
    for (int k = 0; k < kNumPagedKinds; ++k) {
      const auto kind = static_cast<CacheKindIndex>(k);
      if (hit.pages[kind].empty()) continue;
      ISTHMUS_RETURN_IF_ERROR(CopyEntries(pool_->pages(kind), pool_->layout().kinds[kind], rest,
                                          hit.pages[kind][index].page(), pages_[kind][index]));
    }
  }
  if (!hit.snapshot.is_held()) return absl::OkStatus();
  return CopyBytes(*pool_->snapshots_, hit.snapshot.page(), pool_->slots(), slot_,
                   SnapshotBytes(pool_->layout()));
}

absl::Status SequenceCache::ForkInto(SequenceCache& fork) {
  ISTHMUS_CHECK(is_open() && fork.pool_ == pool_ && &fork != this && fork.num_tokens_ == 0);
  const int64_t page_tokens = pool_->layout().geometry.page_tokens;
  const int64_t num_full = num_tokens_ / page_tokens;
  const auto own = std::exchange(fork.pages_, {});
  fork.addresses_ = {};
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    for (int64_t page = 0; page < num_full && !pages_[kind].empty(); ++page) {
      pool_->pages(kind).Hold(pages_[kind][static_cast<size_t>(page)]);
      fork.AddPage(k, pages_[kind][static_cast<size_t>(page)]);
    }
    for (const int32_t page : own[kind]) fork.AddPage(k, page);
  }
  fork.capacity_tokens_ += num_full * page_tokens;
  fork.num_shared_tokens_ = num_full * page_tokens;
  absl::Status status = CopyBehind(num_full, fork);
  if (!status.ok()) {
    fork.Reset();
    return status;
  }
  fork.num_tokens_ = num_tokens_;
  num_shared_tokens_ = std::max(num_shared_tokens_, fork.num_shared_tokens_);
  return absl::OkStatus();
}

// The page behind the full ones, if it holds anything, and the state.
absl::Status SequenceCache::CopyBehind(int64_t num_full, SequenceCache& fork) const {
  ISTHMUS_RETURN_IF_ERROR(fork.Reserve(num_tokens_));
  const auto index = static_cast<size_t>(num_full);
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    const bool has_rest = num_tokens_ > num_full * pool_->layout().geometry.page_tokens;
    if (!has_rest || index >= pages_[kind].size()) continue;
    const PagePool& pages = pool_->pages(kind);
    ISTHMUS_RETURN_IF_ERROR(
        CopyBytes(pages, pages_[kind][index], pages, fork.pages_[kind][index], pages.page_bytes()));
  }
  return CopyBytes(pool_->slots(), slot_, pool_->slots(), fork.slot_, pool_->slots().page_bytes());
}

PrefixIndex::PageLists SequenceCache::page_lists() const {
  PrefixIndex::PageLists lists;
  for (size_t k = 0; k < lists.size(); ++k) lists[k] = pages_[k];
  return lists;
}

absl::Status SequenceCache::SetNumTokens(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > capacity_tokens_) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence cache: ", num_tokens, " tokens, room for ", capacity_tokens_));
  }
  num_tokens_ = num_tokens;
  return absl::OkStatus();
}

kernels::SequenceKv SequenceCache::View(int64_t first_row, int64_t num_rows) const {
  ISTHMUS_CHECK(is_open() && num_tokens_ + num_rows <= capacity_tokens_);
  ISTHMUS_CHECK(num_tokens_ >= num_shared_tokens_);  // Shared pages are never written.
  kernels::SequenceKv view;
  view.first_row = first_row;
  view.num_rows = num_rows;
  view.start_position = num_tokens_;
  for (int k = 0; k < kNumPagedKinds; ++k) view.pages[k] = addresses_[k];
  view.state = pool_->slots().address(slot_);
  return view;
}

void SequenceCache::Reset() {
  ISTHMUS_CHECK(is_open());
  for (int k = 0; k < kNumPagedKinds; ++k) {
    for (int32_t page : pages_[k]) pool_->pages(static_cast<CacheKindIndex>(k)).Release(page);
    pages_[k].clear();
    addresses_[k].clear();
  }
  num_tokens_ = 0;
  capacity_tokens_ = 0;
  num_shared_tokens_ = 0;
  // A device that cannot even do this fails the next step, which can say so.
  (void)pool_->slots().Clear(slot_);
}

void SequenceCache::Close() {
  if (!is_open()) return;
  Reset();
  pool_->slots().Release(slot_);
  pool_ = nullptr;
  slot_ = -1;
}

absl::StatusOr<std::unique_ptr<CachePool>> CachePool::Create(const kernels::KvLayout& layout,
                                                             int64_t num_tokens,
                                                             int32_t num_sequences, int device,
                                                             const PrefixOptions& prefixes,
                                                             std::span<const int> replicas) {
  if (num_tokens <= 0 || num_sequences <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("cache pool: num_tokens ", num_tokens,
                                                   ", num_sequences ", num_sequences,
                                                   ", both must be positive"));
  }
  std::unique_ptr<CachePool> pool(new CachePool(layout));
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    ISTHMUS_ASSIGN_OR_RETURN(
        pool->pages_[k], PagePool::Create(layout.kinds[kind].name, layout.kinds[kind].bytes(),
                                          static_cast<int32_t>(layout.PagesFor(kind, num_tokens)),
                                          device, replicas));
  }
  ISTHMUS_ASSIGN_OR_RETURN(pool->slots_, PagePool::Create("state_slot", layout.state_slot_bytes,
                                                          num_sequences, device, replicas));
  ISTHMUS_RETURN_IF_ERROR(pool->CreatePrefixes(prefixes, num_tokens, replicas));
  return pool;
}

absl::Status CachePool::CreatePrefixes(const PrefixOptions& options, int64_t num_tokens,
                                       std::span<const int> replicas) {
  if (options.num_snapshots == 0) return absl::OkStatus();
  if (options.num_snapshots < 0 || options.tails < 1 || options.snapshot_interval < 1 ||
      options.snapshot_interval % kPrefixBlockTokens != 0 || options.host_bytes < 0 ||
      options.host_step_bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "prefix cache: num_snapshots ", options.num_snapshots, ", tails ", options.tails,
        ", snapshot_interval ", options.snapshot_interval, ", host_bytes ", options.host_bytes,
        ", host_step_bytes ", options.host_step_bytes,
        "; tails must be positive, the interval a multiple of ", kPrefixBlockTokens,
        ", the rest not negative"));
  }
  ISTHMUS_ASSIGN_OR_RETURN(snapshots_, PagePool::Create("snapshot", SnapshotBytes(layout_),
                                                        options.num_snapshots, device(), replicas));
  PrefixIndex::Pools pools;
  pools.pages = paged_pools();
  pools.snapshots = snapshots_.get();
  // As many as the pages have room for, rounded up to whole pages.
  const int64_t max_blocks = (num_tokens + layout_.geometry.page_tokens) / kPrefixBlockTokens;
  prefixes_ = std::make_unique<PrefixIndex>(layout_, pools, options, max_blocks);
  return absl::OkStatus();
}

PagedPools CachePool::paged_pools() const {
  PagedPools pools{};
  for (size_t k = 0; k < pages_.size(); ++k) pools[k] = pages_[k].get();
  return pools;
}

// Under take_mutex_. Whether the pools have so many free pages; ResourceExhausted: not even with
// what could be evicted.
absl::StatusOr<bool> CachePool::HasFree(const std::array<int64_t, kNumPagedKinds>& counts) const {
  bool has_free = true;
  for (size_t k = 0; k < counts.size(); ++k) {
    const PagePool& pool = *pages_[k];
    if (counts[k] > pool.num_available()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("page pool ", layout_.kinds[k].name, ": ", counts[k], " pages wanted, ",
                       pool.num_available(), " of ", pool.num_pages(), " free or evictable"));
    }
    has_free = has_free && counts[k] <= pool.num_free();
  }
  return has_free;
}

absl::StatusOr<CachePool::Pages> CachePool::Take(
    const std::array<int64_t, kNumPagedKinds>& counts) {
  // What is evicted may be copied first, for which others should not wait. They may also take what
  // became free, so that the last attempt is made under the lock.
  constexpr int kAttempts = 3;
  for (int attempt = 1; attempt < kAttempts; ++attempt) {
    {
      MutexLock lock(take_mutex_);
      ISTHMUS_ASSIGN_OR_RETURN(const bool has_free, HasFree(counts));
      if (has_free) return TakeFree(counts);
    }
    prefixes_->EvictUntil(counts);
  }
  MutexLock lock(take_mutex_);
  ISTHMUS_ASSIGN_OR_RETURN(const bool has_free, HasFree(counts));
  // What a look-up has found meanwhile cannot be evicted any more: TakeFree says so.
  if (!has_free) prefixes_->EvictUntil(counts);
  return TakeFree(counts);
}

// Under take_mutex_.
absl::StatusOr<CachePool::Pages> CachePool::TakeFree(
    const std::array<int64_t, kNumPagedKinds>& counts) {
  Pages pages;
  for (size_t k = 0; k < counts.size(); ++k) {
    absl::StatusOr<std::vector<int32_t>> taken = pages_[k]->Take(counts[k]);
    if (!taken.ok()) {
      for (size_t earlier = 0; earlier < k; ++earlier) {
        for (const int32_t page : pages[earlier]) pages_[earlier]->Release(page);
      }
      return taken.status();
    }
    pages[k] = *std::move(taken);
  }
  return pages;
}

absl::StatusOr<HeldPage> CachePool::TakeSnapshot(const SequenceCache& cache) {
  ISTHMUS_CHECK(cache.num_tokens() % kPrefixBlockTokens == 0);
  ISTHMUS_ASSIGN_OR_RETURN(HeldPage snapshot, prefixes_->TakeSnapshot());
  ISTHMUS_RETURN_IF_ERROR(
      CopyBytes(*slots_, cache.slot(), *snapshots_, snapshot.page(), SnapshotBytes(layout_)));
  return snapshot;
}

absl::StatusOr<SequenceCache> CachePool::Open() {
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int32_t> slot, slots_->Take(1));
  SequenceCache cache;
  cache.pool_ = this;
  cache.slot_ = slot[0];
  return cache;
}

void CachePool::CheckConservation() const {
  for (const auto& pool : pages_) pool->CheckConservation();
  slots_->CheckConservation();
  if (prefixes_ != nullptr) prefixes_->CheckConservation();
}

}  // namespace isthmus::kv
