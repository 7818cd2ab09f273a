// SPDX-License-Identifier: Apache-2.0
#include "services/kv/sequence_cache.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

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
  pages_ = std::exchange(other.pages_, {});
  addresses_ = std::exchange(other.addresses_, {});
  return *this;
}

SequenceCache::~SequenceCache() { Close(); }

absl::Status SequenceCache::Reserve(int64_t num_tokens) {
  ISTHMUS_CHECK(is_open());
  if (num_tokens <= capacity_tokens_) return absl::OkStatus();
  std::array<std::vector<int32_t>, kNumPagedKinds> added;
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    const int64_t wanted =
        pool_->layout().PagesFor(kind, num_tokens) - static_cast<int64_t>(pages_[kind].size());
    if (wanted <= 0) continue;
    absl::StatusOr<std::vector<int32_t>> taken = pool_->pages(kind).Take(wanted);
    if (!taken.ok()) {
      for (int earlier = 0; earlier < k; ++earlier) {
        for (int32_t page : added[earlier]) {
          pool_->pages(static_cast<CacheKindIndex>(earlier)).Release(page);
        }
      }
      return taken.status();
    }
    added[kind] = *std::move(taken);
  }
  for (int k = 0; k < kNumPagedKinds; ++k) {
    for (int32_t page : added[k]) {
      pages_[k].push_back(page);
      addresses_[k].push_back(pool_->pages(static_cast<CacheKindIndex>(k)).address(page));
    }
  }
  const int64_t page_tokens = pool_->layout().geometry.page_tokens;
  capacity_tokens_ = (num_tokens + page_tokens - 1) / page_tokens * page_tokens;
  return absl::OkStatus();
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
                                                             int32_t num_sequences, int device) {
  if (num_tokens <= 0 || num_sequences <= 0) {
    return absl::InvalidArgumentError(absl::StrCat("cache pool: num_tokens ", num_tokens,
                                                   ", num_sequences ", num_sequences,
                                                   ", both must be positive"));
  }
  std::unique_ptr<CachePool> pool(new CachePool(layout));
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const auto kind = static_cast<CacheKindIndex>(k);
    ISTHMUS_ASSIGN_OR_RETURN(
        pool->pages_[k],
        PagePool::Create(layout.kinds[kind].name, layout.kinds[kind].bytes(),
                         static_cast<int32_t>(layout.PagesFor(kind, num_tokens)), device));
  }
  ISTHMUS_ASSIGN_OR_RETURN(
      pool->slots_, PagePool::Create("state_slot", layout.state_slot_bytes, num_sequences, device));
  return pool;
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
}

}  // namespace isthmus::kv
