// SPDX-License-Identifier: Apache-2.0
// The part of the prefix index that moves what it evicts to host memory, and finds it there.
#include <algorithm>
#include <utility>

#include "services/base/status_macros.h"
#include "services/kv/prefix_index.h"

namespace isthmus::kv {

HostBlock PrefixIndex::HostBlockOf(const Node& node) const {
  return {.name = node.name,
          .parent_name = node.parent_name,
          .tokens = node.tokens,
          .entries = nullptr,
          .snapshot = nullptr,
          .last_use = node.last_use};
}

int64_t PrefixIndex::DepthOf(int32_t node) const {
  int64_t depth = 0;
  for (int32_t up = at(node).parent; up != kNone; up = at(up).parent) ++depth;
  return depth;
}

// Nothing is computed behind a block without a snapshot, at it or further on: it is not kept.
std::optional<PrefixIndex::HostCopy> PrefixIndex::WantedOf(int32_t node) const {
  if (host_ == nullptr) return std::nullopt;
  const Node& leaf = at(node);
  const HostBlock* known = host_->Find(leaf.name, leaf.parent_name, leaf.tokens);
  const bool has_snapshot = known != nullptr && known->snapshot != nullptr;
  if (leaf.snapshot == kNone && !has_snapshot && !host_->HasChild(leaf.name)) return std::nullopt;
  HostCopy copy;
  copy.block = HostBlockOf(leaf);
  copy.has_entries = known == nullptr || known->entries == nullptr;
  copy.pages = leaf.pages;
  copy.first_token = DepthOf(node) % page_blocks_ * kPrefixBlockTokens;
  if (!has_snapshot) copy.snapshot = leaf.snapshot;
  if (!copy.has_entries && copy.snapshot == kNone) return std::nullopt;
  return copy;
}

// The block stays in its pages.
std::optional<PrefixIndex::HostCopy> PrefixIndex::WantedSnapshotOf(int32_t node) const {
  if (host_ == nullptr) return std::nullopt;
  const Node& owner = at(node);
  const HostBlock* known = host_->Find(owner.name, owner.parent_name, owner.tokens);
  if (known != nullptr && known->snapshot != nullptr) return std::nullopt;
  HostCopy copy;
  copy.block = HostBlockOf(owner);
  copy.snapshot = owner.snapshot;
  return copy;
}

int64_t PrefixIndex::BytesOf(const HostCopy& copy) const {
  return (copy.has_entries ? BlockBytes(layout_) : 0) +
         (copy.snapshot != kNone ? pools_.snapshots->page_bytes() : 0);
}

// Kept as the index keeps its own pages, so that whoever asks what can be had still counts them.
void PrefixIndex::Pin(const HostCopy* copy) {
  copies_.push_back(copy);
  for (size_t k = 0; k < copy->pages.size() && copy->has_entries; ++k) {
    if (copy->pages[k] != kNone) pools_.pages[k]->Keep(copy->pages[k]);
  }
  if (copy->snapshot != kNone) pools_.snapshots->Keep(copy->snapshot);
}

void PrefixIndex::Unpin(const HostCopy* copy) {
  std::erase(copies_, copy);
  for (size_t k = 0; k < copy->pages.size() && copy->has_entries; ++k) {
    if (copy->pages[k] != kNone) pools_.pages[k]->Drop(copy->pages[k]);
  }
  if (copy->snapshot != kNone) pools_.snapshots->Drop(copy->snapshot);
}

absl::Status PrefixIndex::ReadCopy(HostCopy* copy) const {
  if (before_copy_ != nullptr) before_copy_();
  if (copy->has_entries) {
    ISTHMUS_ASSIGN_OR_RETURN(copy->block.entries,
                             ReadBlock(layout_, pools_.pages, copy->pages, copy->first_token));
  }
  if (copy->snapshot != kNone) {
    ISTHMUS_ASSIGN_OR_RETURN(copy->block.snapshot, ReadPage(*pools_.snapshots, copy->snapshot,
                                                            pools_.snapshots->page_bytes()));
  }
  return absl::OkStatus();
}

void PrefixIndex::Publish(const HostCopy& copy, const absl::Status& read) {
  if (!read.ok()) {  // Of a GPU that is lost: a step will say so.
    host_->RemoveFrom(copy.block.name);
    return;
  }
  if (copy.has_entries) ++counts_.offloaded_blocks;
  host_->Put(copy.block);
}

// The node that a copy was made of, if it is still there.
std::optional<int32_t> PrefixIndex::FindAgain(const HostCopy& copy) const {
  const auto found = by_name_.find(copy.block.name);
  if (found == by_name_.end() || at(found->second).parent_name != copy.block.parent_name ||
      at(found->second).tokens != copy.block.tokens) {
    return std::nullopt;
  }
  return found->second;
}

HostHit PrefixIndex::FindHost(const PrefixHash& root, std::span<const PrefixHash> chain,
                              std::span<const int32_t> tokens, int64_t min_tokens,
                              int64_t max_tokens) {
  MutexLock lock(mutex_);
  HostHit hit;
  if (host_ == nullptr || host_->num_blocks() == 0) return hit;
  std::vector<int32_t> path = Match(root, chain, tokens);
  const auto most = static_cast<size_t>(std::max<int64_t>(max_tokens, 0) / kPrefixBlockTokens);
  if (path.size() > most) path.resize(most);
  const auto in_host = [&](size_t block) {
    const PrefixHash& parent = block == 0 ? root : chain[block - 1];
    return host_->Find(chain[block], parent,
                       tokens.subspan(block * kPrefixBlockTokens, kPrefixBlockTokens));
  };
  int64_t bytes = 0;
  size_t num_blocks = 0;
  // What follows the pages, as far as one call may copy, up to the last snapshot on the way.
  for (size_t block = 0; block < std::min(chain.size(), most); ++block) {
    const bool has_pages = block < path.size();
    const HostBlock* found = in_host(block);
    if (!has_pages && (found == nullptr || found->entries == nullptr)) break;
    if (!has_pages) {
      hit.blocks.push_back(found->entries);
      bytes += static_cast<int64_t>(found->entries->bytes.size());
    }
    const int64_t end = static_cast<int64_t>(block + 1) * kPrefixBlockTokens;
    if (found == nullptr || found->snapshot == nullptr || end <= min_tokens) continue;
    const auto more = static_cast<int64_t>(found->snapshot->bytes.size());
    if (bytes + more > options_.host_step_bytes) break;
    hit.snapshot = found->snapshot;
    num_blocks = block + 1;
  }
  if (num_blocks == 0) return HostHit();
  const size_t num_in_pages = std::min(num_blocks, path.size());
  hit.blocks.resize(num_blocks - num_in_pages);
  hit.num_tokens = static_cast<int64_t>(num_blocks) * kPrefixBlockTokens;
  hit.first_in_host = chain[std::min(num_in_pages, num_blocks - 1)];
  path.resize(num_in_pages);
  Touch(path);
  hit.pages = HoldPages(path);
  for (size_t block = 0; block < num_blocks; ++block) host_->Touch(chain[block], num_uses_);
  counts_.host_hit_tokens += static_cast<uint64_t>(hit.num_tokens - min_tokens);
  return hit;
}

void PrefixIndex::RefuseHost(const HostHit& hit) {
  MutexLock lock(mutex_);
  for (const SharedBytes& block : hit.blocks) counts_.host_refused_bytes += block->bytes.size();
  counts_.host_refused_bytes += hit.snapshot->bytes.size();
  if (host_ != nullptr) host_->RemoveFrom(hit.first_in_host);
}

}  // namespace isthmus::kv
