// SPDX-License-Identifier: Apache-2.0
#include "services/kv/prefix_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::kv {

using kernels::kNumPagedKinds;

namespace {

// How far back the worth of a snapshot is looked for, in blocks.
constexpr int64_t kMaxWorthBlocks = 64;
// What the pages of a block without a snapshot are worth beside those that end with one: they save
// a transfer, or wait for a snapshot, but nothing can be computed behind them.
constexpr double kPagesAloneShare = 0.125;
constexpr double kMiB = 1 << 20;

std::span<const int32_t> BlockOf(std::span<const int32_t> tokens, size_t block) {
  return tokens.subspan(block * kPrefixBlockTokens, kPrefixBlockTokens);
}

}  // namespace

PrefixIndex::PrefixIndex(const kernels::KvLayout& layout, const Pools& pools,
                         const PrefixOptions& options, int64_t max_blocks)
    : layout_(layout),
      page_blocks_(layout.geometry.page_tokens / kPrefixBlockTokens),
      pools_(pools),
      options_(options),
      max_blocks_(max_blocks) {
  for (const PagePool* pool : pools_.pages) {
    block_bytes_ += static_cast<double>(pool->page_bytes()) / static_cast<double>(page_blocks_);
  }
  snapshot_bytes_ = static_cast<double>(pools_.snapshots->page_bytes());
  if (options_.host_bytes > 0) host_ = std::make_unique<HostStore>(options_.host_bytes);
}

PrefixIndex::~PrefixIndex() { Clear(); }

PrefixHash PrefixIndex::RootOf(absl::string_view salt) const {
  return PrefixRoot(salt, layout_.fingerprint, options_.checkpoint_fingerprint);
}

// The nodes of the longest known prefix, from the first block on. First by name alone, so that the
// processor can look for many at once; then everything is compared.
std::vector<int32_t> PrefixIndex::Match(const PrefixHash& root, std::span<const PrefixHash> chain,
                                        std::span<const int32_t> tokens) const {
  std::vector<int32_t> path;
  path.reserve(chain.size());
  for (const PrefixHash& name : chain) {
    const auto found = by_name_.find(name);
    if (found == by_name_.end()) break;
    path.push_back(found->second);
    __builtin_prefetch(&at(found->second));
  }
  for (size_t block = 0; block < path.size(); ++block) {
    const Node& node = at(path[block]);
    const bool is_same = node.parent == (block == 0 ? kNone : path[block - 1]) &&
                         node.parent_name == (block == 0 ? root : chain[block - 1]) &&
                         HasTokens(node, BlockOf(tokens, block));
    if (!is_same) path.resize(block);
  }
  return path;
}

bool PrefixIndex::HasTokens(const Node& node, std::span<const int32_t> block) {
  return std::memcmp(node.tokens.data(), block.data(), sizeof(node.tokens)) == 0;
}

PrefixHit PrefixIndex::HoldPages(std::span<const int32_t> path) const {
  PrefixHit hit;
  const auto num_blocks = static_cast<int64_t>(path.size());
  hit.num_tokens = num_blocks * kPrefixBlockTokens;
  std::array<std::vector<int32_t>, kNumPagedKinds> pages;
  for (int64_t start = 0; start < num_blocks; start += page_blocks_) {
    // The page of its last block has all blocks before it as well.
    const int64_t last = std::min(start + page_blocks_, num_blocks) - 1;
    const Node& node = at(path[static_cast<size_t>(last)]);
    for (size_t k = 0; k < node.pages.size(); ++k) {
      if (node.pages[k] != kNone) pages[k].push_back(node.pages[k]);
    }
  }
  for (size_t k = 0; k < pages.size(); ++k) {
    pools_.pages[k]->Hold(pages[k]);
    hit.pages[k].reserve(pages[k].size());
    for (const int32_t page : pages[k]) hit.pages[k].emplace_back(pools_.pages[k], page);
  }
  return hit;
}

// Only a path's end can be a leaf.
void PrefixIndex::Touch(std::span<const int32_t> path) {
  if (path.empty()) return;
  const int32_t last = path.back();
  if (IsLeaf(last)) UnfileLeaf(last);
  ++num_uses_;
  for (const int32_t node : path) {
    at(node).page_clock = page_clock_;
    at(node).last_use = num_uses_;
  }
  if (IsLeaf(last)) FileLeaf(last);
}

PrefixHit PrefixIndex::FindState(const PrefixHash& root, std::span<const PrefixHash> chain,
                                 std::span<const int32_t> tokens, int64_t max_tokens) {
  MutexLock lock(mutex_);
  std::vector<int32_t> path = Match(root, chain, tokens);
  const int64_t most = std::max<int64_t>(max_tokens, 0) / kPrefixBlockTokens;
  if (static_cast<int64_t>(path.size()) > most) path.resize(static_cast<size_t>(most));
  Touch(path);
  const auto matched = static_cast<int64_t>(path.size());
  while (!path.empty() && at(path.back()).snapshot == kNone) path.pop_back();
  PrefixHit hit = HoldPages(path);
  hit.num_matched_tokens = matched * kPrefixBlockTokens;
  if (path.empty()) return hit;
  const int32_t last = path.back();
  UnfileSnapshot(last);
  at(last).snapshot_clock = snapshot_clock_;
  at(last).snapshot_use = num_uses_;
  FileSnapshot(last);
  pools_.snapshots->Hold(at(last).snapshot);
  hit.snapshot = HeldPage(pools_.snapshots, at(last).snapshot);
  return hit;
}

PrefixHit PrefixIndex::FindPages(const PrefixHash& root, std::span<const PrefixHash> chain,
                                 std::span<const int32_t> tokens) {
  MutexLock lock(mutex_);
  const std::vector<int32_t> path = Match(root, chain, tokens);
  Touch(path);
  const size_t page_blocks = static_cast<size_t>(page_blocks_);
  PrefixHit hit = HoldPages(std::span(path).first(path.size() / page_blocks * page_blocks));
  hit.num_matched_tokens = static_cast<int64_t>(path.size()) * kPrefixBlockTokens;
  return hit;
}

void PrefixIndex::CountQuery(int64_t num_tokens, int64_t num_hit_tokens) {
  MutexLock lock(mutex_);
  counts_.queried_tokens += static_cast<uint64_t>(num_tokens);
  counts_.hit_tokens += static_cast<uint64_t>(num_hit_tokens);
}

void PrefixIndex::Insert(const PrefixHash& root, std::span<const PrefixHash> chain,
                         std::span<const int32_t> tokens, const PageLists& pages) {
  MutexLock lock(mutex_);
  // From the end: nearly always all but the last block is known.
  size_t known = chain.size();
  int32_t parent = kNone;
  for (; known > 0; --known) {
    const auto found = by_name_.find(chain[known - 1]);
    if (found == by_name_.end()) continue;
    parent = found->second;
    // Another prefix with this name: what lies behind it could not be told apart.
    if (!HasTokens(at(parent), BlockOf(tokens, known - 1))) return;
    break;
  }
  for (size_t block = known; block < chain.size(); ++block) {
    Node node;
    node.name = chain[block];
    node.parent_name = block == 0 ? root : chain[block - 1];
    std::ranges::copy(BlockOf(tokens, block), node.tokens.begin());
    node.parent = parent;
    for (size_t k = 0; k < node.pages.size(); ++k) {
      const size_t page = block / static_cast<size_t>(page_blocks_);
      node.pages[k] = pages[k].empty() ? kNone : pages[k][page];
    }
    parent = AddNode(node);
    if (parent == kNone) return;
  }
}

// kNone when the index is full of what cannot be evicted.
int32_t PrefixIndex::AddNode(const Node& node) {
  if (node.parent != kNone) {
    // No leaf from here on, so that making room does not take it.
    if (IsLeaf(node.parent)) UnfileLeaf(node.parent);
    ++at(node.parent).num_children;
  }
  if (static_cast<int64_t>(by_name_.size()) >= max_blocks_) {
    const std::optional<int32_t> victim = NextLeaf();
    if (!victim.has_value()) {
      if (node.parent != kNone && --at(node.parent).num_children == 0) FileLeaf(node.parent);
      return kNone;
    }
    // Blocks lie in pages, so that pages are out of room first: no copy is made for this.
    if (WantedOf(*victim).has_value()) {
      ++counts_.lost_blocks;
      host_->RemoveFrom(at(*victim).name);
    }
    EvictLeaf(*victim);
  }
  if (unused_.empty()) {
    unused_.push_back(static_cast<int32_t>(nodes_.size()));
    nodes_.emplace_back();
  }
  const int32_t added = unused_.back();
  unused_.pop_back();
  at(added) = node;
  by_name_.emplace(node.name, added);
  for (size_t k = 0; k < node.pages.size(); ++k) {
    if (node.pages[k] != kNone) pools_.pages[k]->Keep(node.pages[k]);
  }
  at(added).page_clock = page_clock_;
  at(added).last_use = ++num_uses_;
  FileLeaf(added);
  return added;
}

void PrefixIndex::RemoveLeaf(int32_t node) {
  UnfileLeaf(node);
  if (at(node).snapshot != kNone) DropSnapshot(node);
  for (size_t k = 0; k < at(node).pages.size(); ++k) {
    if (at(node).pages[k] != kNone) pools_.pages[k]->Drop(at(node).pages[k]);
  }
  const int32_t parent = at(node).parent;
  if (parent != kNone && --at(parent).num_children == 0) FileLeaf(parent);
  by_name_.erase(at(node).name);
  unused_.push_back(node);
}

int64_t PrefixIndex::TokensSinceSnapshot(int32_t node) const {
  int64_t blocks = 1;
  for (int32_t up = at(node).parent; blocks < kMaxWorthBlocks && up != kNone; up = at(up).parent) {
    if (at(up).snapshot != kNone) break;
    ++blocks;
  }
  return blocks * kPrefixBlockTokens;
}

// GreedyDual with a clock: what was of use lately, then tokens that would have to be computed again
// for each MiB that is kept.
void PrefixIndex::FileLeaf(int32_t node) {
  Node& leaf = at(node);
  double tokens = kPagesAloneShare * kPrefixBlockTokens;
  double bytes = block_bytes_;
  if (leaf.snapshot != kNone) {
    tokens = static_cast<double>(leaf.snapshot_tokens);
    bytes = block_bytes_ * tokens / kPrefixBlockTokens + snapshot_bytes_;
  }
  leaf.leaf_worth = leaf.page_clock + tokens * kMiB / std::max(bytes, 1.0);
  leaves_.insert({leaf.leaf_worth, leaf.last_use, node});
}

void PrefixIndex::UnfileLeaf(int32_t node) {
  leaves_.erase({at(node).leaf_worth, at(node).last_use, node});
}

void PrefixIndex::FileSnapshot(int32_t node) {
  Node& owner = at(node);
  owner.snapshot_worth = owner.snapshot_clock + static_cast<double>(owner.snapshot_tokens) * kMiB /
                                                    std::max(snapshot_bytes_, 1.0);
  snapshots_.insert({owner.snapshot_worth, owner.snapshot_use, node});
}

void PrefixIndex::UnfileSnapshot(int32_t node) {
  snapshots_.erase({at(node).snapshot_worth, at(node).snapshot_use, node});
}

bool PrefixIndex::HasIdlePage(const Node& node) const {
  for (size_t k = 0; k < node.pages.size(); ++k) {
    if (node.pages[k] != kNone && pools_.pages[k]->is_idle(node.pages[k])) return true;
  }
  return false;
}

// A leaf in use is passed over as long as there is another one: it would free nothing. There are no
// more of them than running sequences.
std::optional<int32_t> PrefixIndex::NextLeaf() const {
  if (leaves_.empty()) return std::nullopt;
  const auto idle = std::ranges::find_if(
      leaves_, [this](const Filed& filed) { return HasIdlePage(at(filed.node)); });
  return idle != leaves_.end() ? idle->node : leaves_.begin()->node;
}

void PrefixIndex::EvictLeaf(int32_t node) {
  page_clock_ = std::max(page_clock_, at(node).leaf_worth);
  if (host_ != nullptr) host_->Touch(at(node).name, at(node).last_use);
  RemoveLeaf(node);
  ++counts_.evicted_blocks;
}

// Until there is room, or something must be copied before it can go.
PrefixIndex::Room PrefixIndex::MakeRoom(const std::array<int64_t, kNumPagedKinds>& num_free,
                                        int64_t* host_bytes, HostCopy* copy) {
  for (size_t k = 0; k < num_free.size(); ++k) {
    while (pools_.pages[k]->num_free() < num_free[k]) {
      const std::optional<int32_t> victim = NextLeaf();
      if (!victim.has_value()) return Room::kNoneLeft;
      std::optional<HostCopy> wanted = WantedOf(*victim);
      if (wanted.has_value()) {
        const int64_t bytes = BytesOf(*wanted);
        if (bytes <= *host_bytes) {
          *host_bytes -= bytes;
          *copy = *std::move(wanted);
          return Room::kNeedsCopy;
        }
        ++counts_.lost_blocks;
        host_->RemoveFrom(at(*victim).name);
      }
      EvictLeaf(*victim);
    }
  }
  return Room::kMade;
}

bool PrefixIndex::EvictUntil(const std::array<int64_t, kNumPagedKinds>& num_free) {
  int64_t host_bytes = options_.host_step_bytes;
  for (;;) {  // Every copy takes of host_bytes.
    HostCopy copy;
    {
      MutexLock lock(mutex_);
      const Room room = MakeRoom(num_free, &host_bytes, &copy);
      if (room != Room::kNeedsCopy) return room == Room::kMade;
      Pin(&copy);
    }
    const absl::Status read = ReadCopy(&copy);
    MutexLock lock(mutex_);
    Unpin(&copy);
    Publish(copy, read);
    const std::optional<int32_t> node = FindAgain(copy);
    // Whoever found it meanwhile, or goes on from it, had use for it.
    if (node.has_value() && IsLeaf(*node) && at(*node).last_use == copy.block.last_use) {
      EvictLeaf(*node);
    }
  }
}

bool PrefixIndex::LacksSnapshot(const PrefixHash& name) const {
  MutexLock lock(mutex_);
  const auto found = by_name_.find(name);
  return found != by_name_.end() && at(found->second).snapshot == kNone;
}

void PrefixIndex::DropSnapshot(int32_t node) {
  UnfileSnapshot(node);
  pools_.snapshots->Drop(at(node).snapshot);
  at(node).snapshot = kNone;
}

// None when each is being copied by somebody.
std::optional<int32_t> PrefixIndex::NextSnapshot() const {
  const auto idle = std::ranges::find_if(snapshots_, [this](const Filed& filed) {
    return pools_.snapshots->is_idle(at(filed.node).snapshot);
  });
  if (idle == snapshots_.end()) return std::nullopt;
  return idle->node;
}

void PrefixIndex::EvictSnapshot(int32_t node) {
  snapshot_clock_ = std::max(snapshot_clock_, at(node).snapshot_worth);
  const bool is_leaf = IsLeaf(node);
  if (is_leaf) UnfileLeaf(node);
  DropSnapshot(node);
  if (is_leaf) FileLeaf(node);
  ++counts_.evicted_snapshots;
}

absl::StatusOr<HeldPage> PrefixIndex::TakeSnapshot() {
  // Others may find, or take, what was copied: what comes after a few copies is evicted at once.
  constexpr int kMaxCopies = 3;
  for (int num_copies = 0;; ++num_copies) {
    HostCopy copy;
    {
      MutexLock lock(mutex_);
      std::optional<int32_t> victim;
      if (pools_.snapshots->num_free() == 0) victim = NextSnapshot();
      std::optional<HostCopy> wanted;
      if (victim.has_value() && num_copies < kMaxCopies) wanted = WantedSnapshotOf(*victim);
      if (!wanted.has_value()) {
        if (victim.has_value()) EvictSnapshot(*victim);
        ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int32_t> taken, pools_.snapshots->Take(1));
        return HeldPage(pools_.snapshots, taken[0]);
      }
      copy = *std::move(wanted);
      Pin(&copy);
    }
    const absl::Status read = ReadCopy(&copy);
    MutexLock lock(mutex_);
    Unpin(&copy);
    if (read.ok()) Publish(copy, read);
    const std::optional<int32_t> node = FindAgain(copy);
    if (node.has_value() && at(*node).snapshot == copy.snapshot &&
        pools_.snapshots->is_idle(copy.snapshot)) {
      EvictSnapshot(*node);
    }
    if (pools_.snapshots->num_free() == 0) continue;
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int32_t> taken, pools_.snapshots->Take(1));
    return HeldPage(pools_.snapshots, taken[0]);
  }
}

void PrefixIndex::AddSnapshot(const PrefixHash& name, HeldPage snapshot, SnapshotReason reason) {
  MutexLock lock(mutex_);
  const auto found = by_name_.find(name);
  if (found == by_name_.end() || at(found->second).snapshot != kNone) return;
  const int32_t node = found->second;
  if (IsLeaf(node)) UnfileLeaf(node);
  pools_.snapshots->Keep(snapshot.page());
  at(node).snapshot = snapshot.page();
  at(node).reason = reason;
  at(node).snapshot_tokens = TokensSinceSnapshot(node);
  at(node).snapshot_clock = snapshot_clock_;
  at(node).snapshot_use = ++num_uses_;
  FileSnapshot(node);
  if (IsLeaf(node)) FileLeaf(node);
  DropOldTails(node);
}

// A conversation is the way up to the nearest block that other conversations go on from.
void PrefixIndex::DropOldTails(int32_t node) {
  int32_t num_tails = 0;
  for (int32_t up = node; up != kNone; up = at(up).parent) {
    if (up != node && at(up).num_children > 1) return;
    if (at(up).snapshot == kNone || at(up).reason != SnapshotReason::kTail) continue;
    if (++num_tails > options_.tails) DropSnapshot(up);
  }
}

void PrefixIndex::Clear() {
  MutexLock lock(mutex_);
  if (host_ != nullptr) host_ = std::make_unique<HostStore>(options_.host_bytes);
  while (!leaves_.empty()) RemoveLeaf(leaves_.begin()->node);
  ISTHMUS_CHECK(by_name_.empty() && snapshots_.empty());
}

PrefixCounts PrefixIndex::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

int64_t PrefixIndex::num_blocks() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(by_name_.size());
}

int64_t PrefixIndex::host_bytes() const {
  MutexLock lock(mutex_);
  return host_ == nullptr ? 0 : host_->bytes();
}

void PrefixIndex::CheckConservation() const {
  MutexLock lock(mutex_);
  if (host_ != nullptr) host_->CheckConservation();
  std::array<std::vector<int32_t>, kNumPagedKinds> kept;
  for (size_t k = 0; k < kept.size(); ++k) {
    kept[k].resize(static_cast<size_t>(pools_.pages[k]->num_pages()));
  }
  std::vector<int32_t> kept_snapshots(static_cast<size_t>(pools_.snapshots->num_pages()));
  std::vector<int32_t> num_children(nodes_.size());
  size_t num_leaves = 0;
  size_t num_snapshots = 0;
  for (const HostCopy* copy : copies_) {
    for (size_t k = 0; k < kept.size(); ++k) {
      if (copy->has_entries && copy->pages[k] != kNone) {
        ++kept[k][static_cast<size_t>(copy->pages[k])];
      }
    }
    if (copy->snapshot != kNone) ++kept_snapshots[static_cast<size_t>(copy->snapshot)];
  }
  for (const auto& [name, index] : by_name_) {
    const Node& node = at(index);
    ISTHMUS_CHECK(node.name == name);
    if (node.parent != kNone) ++num_children[static_cast<size_t>(node.parent)];
    for (size_t k = 0; k < kept.size(); ++k) {
      if (node.pages[k] != kNone) ++kept[k][static_cast<size_t>(node.pages[k])];
    }
    if (node.num_children == 0) ++num_leaves;
    if (node.snapshot == kNone) continue;
    ++kept_snapshots[static_cast<size_t>(node.snapshot)];
    ++num_snapshots;
  }
  for (const auto& [name, index] : by_name_) {
    ISTHMUS_CHECK(at(index).num_children == num_children[static_cast<size_t>(index)]);
  }
  ISTHMUS_CHECK(num_leaves == leaves_.size() && num_snapshots == snapshots_.size());
  for (size_t k = 0; k < kept.size(); ++k) pools_.pages[k]->CheckConservation(kept[k]);
  pools_.snapshots->CheckConservation(kept_snapshots);
}

}  // namespace isthmus::kv
