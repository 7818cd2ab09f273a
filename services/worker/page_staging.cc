// SPDX-License-Identifier: Apache-2.0
#include "services/worker/page_staging.h"

#include <algorithm>
#include <cstring>

#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::worker {
namespace {

// Pinned buffers that wait for the next prompt; more are freed.
constexpr size_t kMaxIdle = 4;
constexpr int64_t kMinBufferBytes = int64_t{4} << 20;

}  // namespace

kv::PagePool& PageStaging::pages(size_t region) const {
  return region < kernels::kNumPagedKinds
             ? pool_->pages(static_cast<kernels::CacheKindIndex>(region))
             : pool_->slots();
}

absl::StatusOr<std::unique_ptr<PageStaging>> PageStaging::Create(kv::CachePool* pool,
                                                                 bool has_mirrors) {
  std::unique_ptr<PageStaging> staging(new PageStaging(pool));
  for (int rank = staging->num_ranks() - 1; rank >= 0; --rank) {  // Ends on the first's device.
    ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool->slots().arena().device_of(rank)));
    ISTHMUS_ASSIGN_OR_RETURN(kernels::DeviceStream stream, kernels::DeviceStream::Create());
    staging->streams_.insert(staging->streams_.begin(), std::move(stream));
  }
  if (!has_mirrors) return staging;
  for (size_t region = 0; region < staging->mirrors_.size(); ++region) {
    ISTHMUS_ASSIGN_OR_RETURN(staging->mirrors_[region],
                             kv::Arena::Create(staging->pages(region).arena().bytes()));
  }
  return staging;
}

std::vector<transfer::LocalRegion> PageStaging::regions() const {
  std::vector<transfer::LocalRegion> regions;
  regions.reserve(mirrors_.size());
  for (size_t region = 0; region < mirrors_.size(); ++region) {
    regions.push_back({mirrors_[region].data(), static_cast<uint64_t>(pages(region).page_bytes()),
                       static_cast<uint64_t>(pages(region).num_pages())});
  }
  return regions;
}

std::byte* PageStaging::MirrorOf(const std::byte* address) const {
  for (size_t region = 0; region < mirrors_.size(); ++region) {
    const kv::Arena& arena = pages(region).arena();
    if (address >= arena.data() && address < arena.data() + arena.bytes()) {
      return mirrors_[region].data() + (address - arena.data());
    }
  }
  CheckFailed(__FILE__, __LINE__, "an address lies in no pool");
}

absl::Status PageStaging::CopyUp(const kv::SequenceCache& cache, int64_t num_tokens,
                                 int64_t held_tokens) {
  MutexLock lock(mutex_);
  for (int rank = num_ranks() - 1; rank >= 0; --rank) {
    ISTHMUS_RETURN_IF_ERROR(CopyUp(rank, cache, num_tokens, held_tokens));
  }
  return absl::OkStatus();
}

absl::Status PageStaging::CopyUp(int rank, const kv::SequenceCache& cache, int64_t num_tokens,
                                 int64_t held_tokens) {
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool_->slots().arena().device_of(rank)));
  const kernels::DeviceStream& stream = streams_[static_cast<size_t>(rank)];
  const auto copy = [&](const kv::PagePool& pool, int32_t page) {
    return kernels::CopyToDevice(pool.address_of(rank, page), MirrorOf(pool.address(page)),
                                 pool.page_bytes(), stream.get());
  };
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    const kv::PagePool& pool = pool_->pages(kind);
    if (pool.page_bytes() == 0) continue;
    const int64_t count = pool_->layout().PagesFor(kind, num_tokens);
    for (int64_t i = held_tokens / pool_->layout().geometry.page_tokens; i < count; ++i) {
      const int32_t page = cache.pages(kind)[static_cast<size_t>(i)];
      ISTHMUS_RETURN_IF_ERROR(copy(pool, page));
    }
  }
  ISTHMUS_RETURN_IF_ERROR(copy(pool_->slots(), cache.slot()));
  return stream.Synchronise();
}

absl::StatusOr<kernels::PinnedBuffer> PageStaging::Borrow(int64_t bytes) {
  {
    MutexLock lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(),
                                    [&](const auto& buffer) { return buffer.bytes() >= bytes; });
    if (found != idle_.end()) {
      kernels::PinnedBuffer buffer = std::move(*found);
      idle_.erase(found);
      return buffer;
    }
  }
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool_->device()));
  return kernels::PinnedBuffer::Allocate(std::max(bytes, kMinBufferBytes));
}

void PageStaging::GiveBack(kernels::PinnedBuffer buffer) {
  MutexLock lock(mutex_);
  if (idle_.size() < kMaxIdle) idle_.push_back(std::move(buffer));
}

absl::Status PageStaging::CopyDown(const std::vector<std::pair<const std::byte*, int64_t>>& from,
                                   const kernels::PinnedBuffer& to) {
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool_->device()));
  MutexLock lock(mutex_);
  int64_t at = 0;
  for (const auto& [address, bytes] : from) {
    ISTHMUS_CHECK(at + bytes <= to.bytes());
    ISTHMUS_RETURN_IF_ERROR(kernels::CopyToHost(to.data() + at, address, bytes, streams_[0].get()));
    at += bytes;
  }
  return streams_[0].Synchronise();
}

}  // namespace isthmus::worker
