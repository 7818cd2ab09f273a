// SPDX-License-Identifier: Apache-2.0
// The owner of all pages of one cache kind: one arena, an index per page, a count of holders per
// page. Bookkeeping only; it moves no bytes. Thread-safe: RPC threads reserve while the step loop
// grows running sequences.
//
// The prefix index is a holder of its own kind: a page that it alone holds is idle, which is as
// good as free to whoever may evict it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "services/base/mutex.h"
#include "services/base/status_macros.h"

namespace isthmus::kv {

// Where pages lie: in the memory of the host, or of a GPU by its number.
inline constexpr int kHostMemory = -1;

// Zero-filled memory. On the host it is aligned to a machine page, committed only when touched, and
// registered with a transport as a whole; of a GPU it is taken at once.
//
// The ranks of a tensor-parallel group hold the same cache: rank 0 the arena itself, every further
// rank a replica. Who writes into an arena by other means than a step of all ranks writes into the
// replicas too (OnEveryRank); reading one is enough.
class Arena {
 public:
  Arena() = default;
  // `replicas`: the GPUs of the further ranks, for an arena on a GPU; numbers may repeat.
  static absl::StatusOr<Arena> Create(int64_t bytes, int device = kHostMemory,
                                      std::span<const int> replicas = {});
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  // The GPU's number, or kHostMemory.
  int device() const { return device_; }

  int num_ranks() const { return 1 + static_cast<int>(replicas_.size()); }
  std::byte* data_of(int rank) const { return rank == 0 ? data_ : replica(rank).memory.data(); }
  int device_of(int rank) const { return rank == 0 ? device_ : replica(rank).device; }

 private:
  struct Replica {
    int device = kHostMemory;
    kernels::DeviceBuffer memory;
  };
  const Replica& replica(int rank) const { return replicas_[static_cast<size_t>(rank - 1)]; }

  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
  int device_ = kHostMemory;
  kernels::DeviceBuffer on_device_;
  std::vector<Replica> replicas_;
};

// Calls enqueue(rank), which returns a Status, for every rank of an arena, with its device the
// calling thread's, and waits for what it enqueued on the default stream. The thread ends on the
// device of rank 0. In host memory: one call.
template <typename Enqueue>
absl::Status OnEveryRank(const Arena& arena, Enqueue enqueue) {
  if (arena.device() == kHostMemory) return enqueue(0);
  for (int rank = arena.num_ranks() - 1; rank >= 0; --rank) {
    ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(arena.device_of(rank)));
    ISTHMUS_RETURN_IF_ERROR(enqueue(rank));
    ISTHMUS_RETURN_IF_ERROR(kernels::DeviceStream().Synchronise());
  }
  return absl::OkStatus();
}

class PagePool {
 public:
  // `num_pages` pages of `page_bytes` each. `name` appears in errors. `replicas`: as in Arena.
  static absl::StatusOr<std::unique_ptr<PagePool>> Create(std::string name, int64_t page_bytes,
                                                          int32_t num_pages,
                                                          int device = kHostMemory,
                                                          std::span<const int> replicas = {});

  // Takes `count` pages, all or none: ResourceExhausted says how many are wanted and free.
  absl::StatusOr<std::vector<int32_t>> Take(int64_t count);

  // Adds a holder to a page that somebody holds already (sharing of a prefix).
  void Hold(int32_t page);
  void Hold(std::span<const int32_t> pages);

  // Gives one hold back; the page is free when it was the last. Releasing a free page is a bug of
  // ours and ends the process.
  void Release(int32_t page);

  // Adds a hold of the prefix index to a page that somebody holds; gives one back.
  void Keep(int32_t page);
  void Drop(int32_t page);

  // Sets a page to zeros; of a GPU after all that was enqueued before on no stream of its own.
  absl::Status Clear(int32_t page);

  std::byte* address(int32_t page) const { return arena_.data() + page * page_bytes_; }
  std::byte* address_of(int rank, int32_t page) const {
    return arena_.data_of(rank) + page * page_bytes_;
  }
  const Arena& arena() const { return arena_; }
  int64_t page_bytes() const { return page_bytes_; }
  int32_t num_pages() const { return static_cast<int32_t>(holders_.size()); }
  int32_t num_free() const;
  // Free or idle.
  int32_t num_available() const;
  bool is_free(int32_t page) const;
  bool is_idle(int32_t page) const;
  // The prefix index counts for each of its blocks in the page.
  int32_t num_holders(int32_t page) const;

  // Every page is either free once or held; check-fails otherwise.
  void CheckConservation() const;
  // Besides, `num_kept[page]` holds of each page are the prefix index's.
  void CheckConservation(std::span<const int32_t> num_kept) const;

 private:
  struct Holders {
    int32_t all = 0;   // 0: the page is free.
    int32_t kept = 0;  // Of these, the prefix index's.
    bool is_idle() const { return all > 0 && all == kept; }
  };

  PagePool(std::string name, int64_t page_bytes, int32_t num_pages, Arena arena);
  // Under mutex_. Changes the holders of a page that has some, and what follows from them.
  void Change(int32_t page, int32_t all, int32_t kept);

  const std::string name_;
  const int64_t page_bytes_;
  Arena arena_;
  mutable Mutex mutex_;
  std::vector<Holders> holders_;  // Per page.
  std::vector<int32_t> free_;     // Free pages, the next to take at the back.
  int32_t num_idle_ = 0;
};

// One hold of one page, given back when it dies. Move-only.
class HeldPage {
 public:
  HeldPage() = default;
  // Takes over a hold that the caller has.
  HeldPage(PagePool* pool, int32_t page) : pool_(pool), page_(page) {}
  HeldPage(HeldPage&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), page_(std::exchange(other.page_, -1)) {}
  HeldPage& operator=(HeldPage&& other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(page_, other.page_);
    return *this;
  }
  ~HeldPage() {
    if (pool_ != nullptr) pool_->Release(page_);
  }

  bool is_held() const { return pool_ != nullptr; }
  int32_t page() const { return page_; }
  // The hold is the caller's from now on.
  int32_t Detach() {
    pool_ = nullptr;
    return std::exchange(page_, -1);
  }

 private:
  PagePool* pool_ = nullptr;
  int32_t page_ = -1;
};

}  // namespace isthmus::kv
