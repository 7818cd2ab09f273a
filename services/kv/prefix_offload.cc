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

absl::StatusOr<SharedBytes> PrefixIndex::ReadEntries(int32_t node) const {
  const int64_t in_page = DepthOf(node) % page_blocks_;
  return ReadBlock(layout_, pools_.pages, at(node).pages, in_page * kPrefixBlockTokens);
}

// Nothing is computed behind a block without a snapshot, at it or further on: it is not kept.
void PrefixIndex::Offload(int32_t node, int64_t* host_bytes) {
  if (host_ == nullptr) return;
  const Node& leaf = at(node);
  const HostBlock* known = host_->Find(leaf.name, leaf.parent_name, leaf.tokens);
  const bool has_entries = known != nullptr && known->entries != nullptr;
  const bool has_snapshot = known != nullptr && known->snapshot != nullptr;
  HostBlock block = HostBlockOf(leaf);
  absl::Status status;
  if (leaf.snapshot == kNone && !has_snapshot && !host_->HasChild(leaf.name)) return;
  int64_t bytes = has_entries ? 0 : BlockBytes(layout_);
  if (leaf.snapshot != kNone && !has_snapshot) bytes += pools_.snapshots->page_bytes();
  if (bytes > *host_bytes) {
    ++counts_.lost_blocks;
    host_->RemoveFrom(leaf.name);
    return;
  }
  *host_bytes -= bytes;
  const auto keep = [&status](absl::StatusOr<SharedBytes> read, SharedBytes* kept) {
    status.Update(read.status());
    if (read.ok()) *kept = *std::move(read);
  };
  if (!has_entries) keep(ReadEntries(node), &block.entries);
  if (leaf.snapshot != kNone && !has_snapshot) {
    keep(ReadPage(*pools_.snapshots, leaf.snapshot, pools_.snapshots->page_bytes()),
         &block.snapshot);
  }
  if (!status.ok()) {  // Of a GPU that is lost: a step will say so.
    host_->RemoveFrom(leaf.name);
    return;
  }
  if (!has_entries) ++counts_.offloaded_blocks;
  host_->Put(block);
}

// The block stays in its pages.
void PrefixIndex::OffloadSnapshot(int32_t node) {
  if (host_ == nullptr) return;
  const Node& owner = at(node);
  const HostBlock* known = host_->Find(owner.name, owner.parent_name, owner.tokens);
  if (known != nullptr && known->snapshot != nullptr) return;
  absl::StatusOr<SharedBytes> read =
      ReadPage(*pools_.snapshots, owner.snapshot, pools_.snapshots->page_bytes());
  if (!read.ok()) return;
  HostBlock block = HostBlockOf(owner);
  block.snapshot = *std::move(read);
  host_->Put(block);
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
