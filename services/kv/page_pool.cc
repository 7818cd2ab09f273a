// SPDX-License-Identifier: Apache-2.0
#include "services/kv/page_pool.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::kv {

absl::StatusOr<Arena> Arena::Create(int64_t bytes, int device, std::span<const int> replicas) {
  ISTHMUS_CHECK(device != kHostMemory || replicas.empty());
  Arena arena;
  arena.device_ = device;
  if (bytes == 0) return arena;
  if (device != kHostMemory) {
    for (const int other : replicas) {
      ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(other));
      arena.replicas_.emplace_back().device = other;
      ISTHMUS_ASSIGN_OR_RETURN(arena.replicas_.back().memory,
                               kernels::DeviceBuffer::Allocate(bytes));
    }
    ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(device));
    ISTHMUS_ASSIGN_OR_RETURN(arena.on_device_, kernels::DeviceBuffer::Allocate(bytes));
    arena.data_ = arena.on_device_.data();
    arena.bytes_ = bytes;
    ISTHMUS_RETURN_IF_ERROR(OnEveryRank(arena, [&](int rank) {
      return kernels::FillDevice(arena.data_of(rank), 0, bytes, nullptr);
    }));
    return arena;
  }
  void* p = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot map ", bytes, " bytes for the cache: errno ", errno));
  }
  arena.data_ = static_cast<std::byte*>(p);
  arena.bytes_ = bytes;
  return arena;
}

Arena::Arena(Arena&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      device_(other.device_),
      on_device_(std::move(other.on_device_)),
      replicas_(std::move(other.replicas_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  std::swap(on_device_, other.on_device_);
  std::swap(replicas_, other.replicas_);
  return *this;
}

Arena::~Arena() {
  if (data_ != nullptr && device_ == kHostMemory) munmap(data_, static_cast<size_t>(bytes_));
}

absl::StatusOr<std::unique_ptr<PagePool>> PagePool::Create(std::string name, int64_t page_bytes,
                                                           int32_t num_pages, int device,
                                                           std::span<const int> replicas) {
  if (page_bytes < 0 || num_pages < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("page pool ", name, ": page_bytes ", page_bytes, ", num_pages ", num_pages));
  }
  ISTHMUS_ASSIGN_OR_RETURN(Arena arena, Arena::Create(page_bytes * num_pages, device, replicas));
  return std::unique_ptr<PagePool>(
      new PagePool(std::move(name), page_bytes, num_pages, std::move(arena)));
}

PagePool::PagePool(std::string name, int64_t page_bytes, int32_t num_pages, Arena arena)
    : name_(std::move(name)),
      page_bytes_(page_bytes),
      arena_(std::move(arena)),
      holders_(static_cast<size_t>(num_pages)) {
  free_.reserve(holders_.size());
  for (int32_t page = num_pages - 1; page >= 0; --page) free_.push_back(page);
}

absl::StatusOr<std::vector<int32_t>> PagePool::Take(int64_t count) {
  MutexLock lock(mutex_);
  if (count < 0 || count > static_cast<int64_t>(free_.size())) {
    return absl::ResourceExhaustedError(absl::StrCat("page pool ", name_, ": ", count,
                                                     " pages wanted, ", free_.size(), " of ",
                                                     holders_.size(), " free"));
  }
  std::vector<int32_t> pages(free_.end() - count, free_.end());
  free_.resize(free_.size() - static_cast<size_t>(count));
  for (int32_t page : pages) holders_[static_cast<size_t>(page)] = {.all = 1};
  return pages;
}

void PagePool::Change(int32_t page, int32_t all, int32_t kept) {
  ISTHMUS_CHECK(page >= 0 && page < num_pages());
  Holders& holders = holders_[static_cast<size_t>(page)];
  ISTHMUS_CHECK(holders.all > 0);
  if (holders.is_idle()) --num_idle_;
  holders.all += all;
  holders.kept += kept;
  ISTHMUS_CHECK(holders.kept >= 0 && holders.kept <= holders.all);
  if (holders.is_idle()) ++num_idle_;
  if (holders.all == 0) free_.push_back(page);
}

void PagePool::Hold(int32_t page) {
  MutexLock lock(mutex_);
  Change(page, 1, 0);
}

void PagePool::Hold(std::span<const int32_t> pages) {
  MutexLock lock(mutex_);
  for (const int32_t page : pages) Change(page, 1, 0);
}

void PagePool::Release(int32_t page) {
  MutexLock lock(mutex_);
  Change(page, -1, 0);
}

void PagePool::Keep(int32_t page) {
  MutexLock lock(mutex_);
  Change(page, 1, 1);
}

void PagePool::Drop(int32_t page) {
  MutexLock lock(mutex_);
  Change(page, -1, -1);
}

absl::Status PagePool::Clear(int32_t page) {
  if (arena_.device() == kHostMemory) {
    std::memset(address(page), 0, static_cast<size_t>(page_bytes_));
    return absl::OkStatus();
  }
  return OnEveryRank(arena_, [&](int rank) {
    return kernels::FillDevice(address_of(rank, page), 0, page_bytes_, nullptr);
  });
}

int32_t PagePool::num_free() const {
  MutexLock lock(mutex_);
  return static_cast<int32_t>(free_.size());
}

int32_t PagePool::num_available() const {
  MutexLock lock(mutex_);
  return static_cast<int32_t>(free_.size()) + num_idle_;
}

bool PagePool::is_free(int32_t page) const {
  MutexLock lock(mutex_);
  ISTHMUS_CHECK(page >= 0 && page < num_pages());
  return holders_[static_cast<size_t>(page)].all == 0;
}

bool PagePool::is_idle(int32_t page) const {
  MutexLock lock(mutex_);
  ISTHMUS_CHECK(page >= 0 && page < num_pages());
  return holders_[static_cast<size_t>(page)].is_idle();
}

int32_t PagePool::num_holders(int32_t page) const {
  MutexLock lock(mutex_);
  ISTHMUS_CHECK(page >= 0 && page < num_pages());
  return holders_[static_cast<size_t>(page)].all;
}

void PagePool::CheckConservation() const { CheckConservation({}); }

void PagePool::CheckConservation(std::span<const int32_t> num_kept) const {
  MutexLock lock(mutex_);
  std::vector<bool> is_free(holders_.size(), false);
  for (int32_t page : free_) {
    ISTHMUS_CHECK(!is_free[static_cast<size_t>(page)]);
    is_free[static_cast<size_t>(page)] = true;
  }
  int32_t num_idle = 0;
  for (size_t page = 0; page < holders_.size(); ++page) {
    const Holders& holders = holders_[page];
    ISTHMUS_CHECK(is_free[page] == (holders.all == 0));
    ISTHMUS_CHECK(num_kept.empty() || num_kept[page] == holders.kept);
    if (holders.is_idle()) ++num_idle;
  }
  ISTHMUS_CHECK(num_idle == num_idle_);
}

}  // namespace isthmus::kv
