// SPDX-License-Identifier: Apache-2.0
// Host memory that pages of a GPU travel through, since the transport moves bytes of the host:
//
//   prefill  pages are copied down into pinned memory; their digests are computed there, and the
//            write reads from there
//   decode   writes land in mirrors of the pools, page by page under the same number; what has been
//            verified there, once, is copied up to every rank before the sequence runs
//
// A mirror takes memory only where writes have landed. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "kvtransfer/receiver.h"
#include "kvtransfer/region.h"
#include "services/base/mutex.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::worker {

class PageStaging {
 public:
  // For a pool on a GPU. `has_mirrors`: for a decode worker.
  static absl::StatusOr<std::unique_ptr<PageStaging>> Create(kv::CachePool* pool, bool has_mirrors);

  // The mirrors, by region number (page_groups.h).
  std::vector<transfer::LocalRegion> regions() const;

  // The place in a mirror of an address in its pool.
  std::byte* MirrorOf(const std::byte* address) const;

  // Copies the pages and the state slot of the first `num_tokens` tokens of `cache` up from the
  // mirrors to every rank, and waits. The pages of the first `held_tokens` did not come and are
  // left alone.
  absl::Status CopyUp(const kv::SequenceCache& cache, int64_t num_tokens, int64_t held_tokens);

  // Pinned memory until it is given back.
  absl::StatusOr<kernels::PinnedBuffer> Borrow(int64_t bytes);
  void GiveBack(kernels::PinnedBuffer buffer);

  // Copies from device memory into pinned memory: `from` one behind another. Waits.
  absl::Status CopyDown(const std::vector<std::pair<const std::byte*, int64_t>>& from,
                        const kernels::PinnedBuffer& to);

 private:
  explicit PageStaging(kv::CachePool* pool) : pool_(pool) {}
  int num_ranks() const { return pool_->slots().arena().num_ranks(); }
  absl::Status CopyUp(int rank, const kv::SequenceCache& cache, int64_t num_tokens,
                      int64_t held_tokens);
  kv::PagePool& pages(size_t region) const;

  kv::CachePool* const pool_;
  std::array<kv::Arena, kernels::kNumPagedKinds + 1> mirrors_;
  Mutex mutex_;                                 // Guards what follows.
  std::vector<kernels::DeviceStream> streams_;  // By rank.
  std::vector<kernels::PinnedBuffer> idle_;
};

}  // namespace isthmus::worker
