// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/page_watch.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "services/worker/page_groups.h"

namespace isthmus::sim {
namespace {

thread_local std::string current_transfer;

kv::PagePool& PoolOf(kv::CachePool& pool, uint32_t region) {
  return region == worker::kStateRegion ? pool.slots()
                                        : pool.pages(static_cast<kernels::CacheKindIndex>(region));
}

std::string Name(const std::string& transfer_id) {
  return transfer_id.empty() ? "nobody" : absl::BytesToHexString(transfer_id.substr(0, 4));
}

}  // namespace

void PageWatch::Watch(uint64_t incarnation, kv::CachePool* pool) {
  MutexLock lock(mutex_);
  pools_[incarnation] = pool;
}

void PageWatch::Forget(uint64_t incarnation) {
  MutexLock lock(mutex_);
  pools_.erase(incarnation);
}

void PageWatch::NoteReserved(const v1::KvReservation& reservation) {
  MutexLock lock(mutex_);
  const uint64_t incarnation = reservation.worker_incarnation();
  for (const v1::CachePages& kind : reservation.pages()) {
    for (const v1::PageRef& page : kind.pages()) {
      owners_[{incarnation, page.region(), page.page()}] = reservation.transfer_id();
    }
  }
  const v1::StateSlotRef& state = reservation.state();
  owners_[{incarnation, state.region(), state.slot()}] = reservation.transfer_id();
}

void PageWatch::NoteRunning(const std::string& transfer_id) {
  MutexLock lock(mutex_);
  running_.insert(transfer_id);
  if (corrupted_.count(transfer_id) == 0) return;
  on_violation_(absl::StrCat("transfer ", Name(transfer_id), " runs on a corrupted page"));
}

void PageWatch::NoteCorrupted(const transfer::LoopbackWrite& write) {
  MutexLock lock(mutex_);
  corrupted_.insert(writers_[write.call_number]);
}

void PageWatch::WriteFor(const std::string& transfer_id) { current_transfer = transfer_id; }

void PageWatch::NotePosted(const transfer::LoopbackWrite& write) {
  MutexLock lock(mutex_);
  writers_[write.call_number] = current_transfer;
}

void PageWatch::NoteLanded(const transfer::LoopbackWrite& write) {
  MutexLock lock(mutex_);
  ++num_landed_;
  const auto found = pools_.find(write.target_incarnation);
  if (found == pools_.end()) return;
  const transfer::PageSpan& span = write.span;
  const std::string& writer = writers_[write.call_number];
  const std::string& owner = owners_[{write.target_incarnation, span.region, span.unit}];
  const kv::PagePool& pool = PoolOf(*found->second, span.region);
  // Pages of prefixes have several holders; into those that wait for a write nobody else may look.
  const int32_t num_holders = pool.num_holders(static_cast<int32_t>(span.unit));
  const bool is_free = num_holders == 0;
  if (num_holders == 1 && owner == writer && running_.count(writer) == 0) return;
  on_violation_(absl::StrCat("a write of transfer ", Name(writer), " landed in region ",
                             span.region, ", unit ", span.unit, " of ", write.target, ", which ",
                             is_free           ? "is free; it belonged last to "
                             : num_holders > 1 ? "is shared; it belongs to "
                             : owner == writer ? "runs already; it belongs to "
                                               : "belongs to ",
                             Name(owner)));
}

void PageWatch::CheckPools() const {
  MutexLock lock(mutex_);
  for (const auto& [incarnation, pool] : pools_) pool->CheckConservation();
}

uint64_t PageWatch::num_landed() const {
  MutexLock lock(mutex_);
  return num_landed_;
}

}  // namespace isthmus::sim
