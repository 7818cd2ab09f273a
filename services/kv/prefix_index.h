// SPDX-License-Identifier: Apache-2.0
// The prefix index: which blocks of 128 tokens are in the pages already, and where. A node is a
// block behind the blocks before it, named by a chained hash (services/base/prefix_hash.h); it
// keeps the page of every paged kind that the block lies in, and maybe a snapshot: the state slot
// as it was at the block's end, without which nothing can be computed behind it (model
// specification 4.5).
//
// Nothing is found that was not computed from the very same tokens under the very same salt: token
// ids are compared, not only names. Thread-safe: RPC threads look up while the step loop inserts.
// Lock order: the index, then its pools. What is evicted is copied to host memory without the lock,
// for on a GPU a copy is a wait: until it is there the block stays where it is, and is found.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/core/kv_layout.h"
#include "services/base/mutex.h"
#include "services/base/prefix_hash.h"
#include "services/kv/host_store.h"
#include "services/kv/page_pool.h"

namespace isthmus::kv {

struct PrefixOptions {
  int32_t num_snapshots = 0;  // 0: there is no prefix cache.
  // Tokens between the snapshots of a long prompt; a multiple of 128.
  int64_t snapshot_interval = 4096;
  // Snapshots that a conversation keeps of its latest ends; at least 1.
  int32_t tails = 2;
  uint64_t checkpoint_fingerprint = 0;
  // Host memory for what is evicted; 0: none. A call copies no more than host_step_bytes to or from
  // it, so that a step waits for no more; what exceeds that is lost, or computed again.
  int64_t host_bytes = 0;
  int64_t host_step_bytes = int64_t{256} << 20;
};

// Why a snapshot was taken. Only tails give way to newer ones of their conversation.
enum class SnapshotReason : uint8_t { kTail, kInterval, kBranch };

// What a look-up found, held until it dies.
struct PrefixHit {
  int64_t num_tokens = 0;  // That can be reused; a multiple of 128.
  // Tokens whose pages are there, snapshot or not; at least num_tokens. Where it is more, a
  // snapshot at its end would have been of use.
  int64_t num_matched_tokens = 0;
  // Of the first num_tokens, in token order; the last page is full or ends in a part that is
  // others'.
  std::array<std::vector<HeldPage>, kernels::kNumPagedKinds> pages;
  HeldPage snapshot;  // Not held when only pages were asked for, or nothing was found.
};

// A prefix that is found further than the pages alone reach, with what was evicted of it.
struct HostHit {
  int64_t num_tokens = 0;           // A multiple of 128; 0: the host has nothing to add.
  PrefixHit pages;                  // Of the blocks in front that are in pages still; no snapshot.
  std::vector<SharedBytes> blocks;  // Of the blocks behind them.
  SharedBytes snapshot;             // At the end.
  PrefixHash first_in_host;         // Name of the first of `blocks`, or where the snapshot is.
};

// Since the start.
struct PrefixCounts {
  uint64_t queried_tokens = 0;
  uint64_t hit_tokens = 0;
  uint64_t evicted_blocks = 0;
  uint64_t evicted_snapshots = 0;
  uint64_t offloaded_blocks = 0;    // Evicted ones that were copied to host memory.
  uint64_t lost_blocks = 0;         // Evicted ones that would have exceeded host_step_bytes.
  uint64_t host_hit_tokens = 0;     // Found in host memory, for whatever came of it.
  uint64_t host_refused_bytes = 0;  // Whose sum differed: forgotten.
};

class PrefixIndex {
 public:
  struct Pools {
    std::array<PagePool*, kernels::kNumPagedKinds> pages{};
    PagePool* snapshots = nullptr;
  };
  // A sequence's pages by kind, in token order.
  using PageLists = std::array<std::span<const int32_t>, kernels::kNumPagedKinds>;

  // The pools must outlive the index. At most `max_blocks` nodes.
  PrefixIndex(const kernels::KvLayout& layout, const Pools& pools, const PrefixOptions& options,
              int64_t max_blocks);
  ~PrefixIndex();
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  const PrefixOptions& options() const { return options_; }
  PrefixHash RootOf(absl::string_view salt) const;

  // For whoever goes on computing: the longest known prefix of `tokens` that has a snapshot and is
  // at most `max_tokens` long. `chain` names the blocks of `tokens` under `root` (ExtendChain).
  PrefixHit FindState(const PrefixHash& root, std::span<const PrefixHash> chain,
                      std::span<const int32_t> tokens, int64_t max_tokens);

  // For whoever gets the state from elsewhere: the longest known prefix that fills whole pages.
  PrefixHit FindPages(const PrefixHash& root, std::span<const PrefixHash> chain,
                      std::span<const int32_t> tokens);

  // For whoever goes on computing, after FindState: the longest known prefix of at most
  // `max_tokens` tokens when host memory makes it longer than `min_tokens`.
  HostHit FindHost(const PrefixHash& root, std::span<const PrefixHash> chain,
                   std::span<const int32_t> tokens, int64_t min_tokens, int64_t max_tokens);

  // Of a host hit whose bytes are not what they were: forgets it, so that it is refused once.
  void RefuseHost(const HostHit& hit);

  // Counts one request's look-up, however often it had to be repeated.
  void CountQuery(int64_t num_tokens, int64_t num_hit_tokens);

  // Makes the blocks of `chain` findable in `pages`, which the caller holds. A block that is known
  // already stays where it is.
  void Insert(const PrefixHash& root, std::span<const PrefixHash> chain,
              std::span<const int32_t> tokens, const PageLists& pages);

  // Whether the prefix is known and has no snapshot.
  bool LacksSnapshot(const PrefixHash& name) const;

  // A page of the snapshot pool to be filled and given to AddSnapshot, from the snapshot that is
  // worth least when none is free. ResourceExhausted: all are being copied.
  absl::StatusOr<HeldPage> TakeSnapshot();

  // The state of `pool` page `snapshot` is the one at the end of the prefix. Forgotten at once when
  // the prefix is not known any more, or has one.
  void AddSnapshot(const PrefixHash& name, HeldPage snapshot, SnapshotReason reason);

  // Evicts leaves, those of least worth first, until every pool has `num_free` free pages. False
  // when nothing is left to evict.
  bool EvictUntil(const std::array<int64_t, kernels::kNumPagedKinds>& num_free);

  // Forgets everything. Not while another thread may be making room.
  void Clear();

  // Called before anything is copied to host memory, without the lock; for tests. Not while another
  // thread may be making room.
  void ObserveCopies(std::function<void()> before_copy) { before_copy_ = std::move(before_copy); }

  PrefixCounts counts() const;
  int64_t num_blocks() const;
  int64_t host_bytes() const;

  // Every hold of the index is that of one node, and every pool is in order; check-fails otherwise.
  void CheckConservation() const;

 private:
  static constexpr int32_t kNone = -1;

  struct Node {
    int32_t parent = kNone;
    int32_t num_children = 0;
    PrefixHash parent_name;  // The root's for a first block.
    PrefixHash name;
    std::array<int32_t, kernels::kNumPagedKinds> pages{};  // kNone: no layer has the kind.
    int32_t snapshot = kNone;
    // GreedyDual: the clock when the pages were last of use, and in which order that was.
    double page_clock = 0;
    uint64_t last_use = 0;
    double leaf_worth = 0;  // What it is filed under in leaves_.
    std::array<int32_t, kPrefixBlockTokens> tokens{};
    SnapshotReason reason = SnapshotReason::kTail;
    int64_t snapshot_tokens = 0;  // From the snapshot before it to it, when it was taken.
    double snapshot_clock = 0;
    uint64_t snapshot_use = 0;
    double snapshot_worth = 0;
  };
  // What is evicted first comes first.
  struct Filed {
    double worth = 0;
    uint64_t last_use = 0;
    int32_t node = kNone;
    auto operator<=>(const Filed&) const = default;
  };

  // Something of a block that host memory shall have, and where it lies. The index keeps these
  // pages while they are copied.
  struct HostCopy {
    HostBlock block;
    bool has_entries = false;  // Wanted, as the snapshot where it is not kNone.
    BlockPages pages{};
    int64_t first_token = 0;  // Of the block in its pages.
    int32_t snapshot = kNone;
  };

  // Without mutex_: fills copy->block.
  absl::Status ReadCopy(HostCopy* copy) const;

  // All under mutex_.
  Node& at(int32_t node) { return nodes_[static_cast<size_t>(node)]; }
  const Node& at(int32_t node) const { return nodes_[static_cast<size_t>(node)]; }
  std::vector<int32_t> Match(const PrefixHash& root, std::span<const PrefixHash> chain,
                             std::span<const int32_t> tokens) const;
  static bool HasTokens(const Node& node, std::span<const int32_t> block);
  PrefixHit HoldPages(std::span<const int32_t> path) const;
  void Touch(std::span<const int32_t> path);
  bool IsLeaf(int32_t node) const { return at(node).num_children == 0; }
  int64_t TokensSinceSnapshot(int32_t node) const;
  void FileLeaf(int32_t node);
  void UnfileLeaf(int32_t node);
  void FileSnapshot(int32_t node);
  void UnfileSnapshot(int32_t node);
  bool HasIdlePage(const Node& node) const;
  int32_t AddNode(const Node& node);
  void RemoveLeaf(int32_t node);
  std::optional<int32_t> NextLeaf() const;
  void EvictLeaf(int32_t node);
  enum class Room : uint8_t { kMade, kNoneLeft, kNeedsCopy };
  Room MakeRoom(const std::array<int64_t, kernels::kNumPagedKinds>& num_free, int64_t* host_bytes,
                HostCopy* copy);
  std::optional<HostCopy> WantedOf(int32_t node) const;
  std::optional<HostCopy> WantedSnapshotOf(int32_t node) const;
  int64_t BytesOf(const HostCopy& copy) const;
  void Pin(const HostCopy* copy);
  void Unpin(const HostCopy* copy);
  void Publish(const HostCopy& copy, const absl::Status& read);
  std::optional<int32_t> FindAgain(const HostCopy& copy) const;
  HostBlock HostBlockOf(const Node& node) const;
  int64_t DepthOf(int32_t node) const;
  void DropSnapshot(int32_t node);
  std::optional<int32_t> NextSnapshot() const;
  void EvictSnapshot(int32_t node);
  void DropOldTails(int32_t node);

  const kernels::KvLayout layout_;
  const int64_t page_blocks_;  // Blocks in a page.
  const Pools pools_;
  const PrefixOptions options_;
  const int64_t max_blocks_;
  double block_bytes_ = 0;
  double snapshot_bytes_ = 0;

  mutable Mutex mutex_;
  std::vector<Node> nodes_;  // Guarded by mutex_, as all below.
  std::vector<int32_t> unused_;
  std::unordered_map<PrefixHash, int32_t, PrefixHashBits> by_name_;
  std::set<Filed> leaves_;
  std::set<Filed> snapshots_;
  double page_clock_ = 0;
  double snapshot_clock_ = 0;
  uint64_t num_uses_ = 0;
  std::unique_ptr<HostStore> host_;      // Null: evicted is gone.
  std::vector<const HostCopy*> copies_;  // Being copied.
  std::function<void()> before_copy_;
  PrefixCounts counts_;
};

}  // namespace isthmus::kv
