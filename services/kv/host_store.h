// SPDX-License-Identifier: Apache-2.0
// Evicted prefixes in host memory: the entries of blocks and the snapshots that the prefix index
// had no room for, by the same names. What is found here is copied back instead of being computed.
// Not thread-safe: the index owns it and calls it under its lock; what was found stays valid.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/kv_layout.h"
#include "services/base/prefix_hash.h"
#include "services/kv/page_pool.h"

namespace isthmus::kv {

// Bytes with their sum, which whoever uses them compares.
struct HostBytes {
  std::vector<std::byte> bytes;
  uint32_t crc32c = 0;
};
using SharedBytes = std::shared_ptr<const HostBytes>;

struct HostBlock {
  PrefixHash name;
  PrefixHash parent_name;
  std::array<int32_t, kPrefixBlockTokens> tokens = {};
  SharedBytes entries = {};   // Of every paged kind; null: only the snapshot is here.
  SharedBytes snapshot = {};  // Null: none is here.
  uint64_t last_use = 0;      // Of the index.
};

class HostStore {
 public:
  // At most `max_bytes` of entries and snapshots.
  explicit HostStore(int64_t max_bytes) : max_bytes_(max_bytes) {}

  // Null when nothing of the block is here, or it is of other tokens.
  const HostBlock* Find(const PrefixHash& name, const PrefixHash& parent_name,
                        std::span<const int32_t> tokens) const;
  // Whether a block behind it is here.
  bool HasChild(const PrefixHash& name) const { return children_.contains(name); }

  // Adds what the store lacks of the block, and evicts what was not used for longest, each with all
  // blocks behind it, until the rest fits.
  void Put(const HostBlock& block);

  void Touch(const PrefixHash& name, uint64_t last_use);

  // Forgets the block and all behind it: they cannot be reached any more.
  void RemoveFrom(const PrefixHash& name);

  int64_t bytes() const { return bytes_; }
  int64_t num_blocks() const { return static_cast<int64_t>(blocks_.size()); }

  // The sums of all sizes and links; check-fails where they disagree.
  void CheckConservation() const;

 private:
  struct Filed {
    uint64_t last_use = 0;
    uint64_t high = 0;
    uint64_t low = 0;
    auto operator<=>(const Filed&) const = default;
  };
  static Filed FiledAs(const HostBlock& block) {
    return {block.last_use, block.name.high, block.name.low};
  }
  void RemoveOne(const PrefixHash& name);

  const int64_t max_bytes_;
  int64_t bytes_ = 0;
  std::unordered_map<PrefixHash, HostBlock, PrefixHashBits> blocks_;
  // By the name of the block before them, which need not be here.
  std::unordered_multimap<PrefixHash, PrefixHash, PrefixHashBits> children_;
  std::set<Filed> by_use_;
};

// ---- Between pages and host memory. Of a GPU, which must have done all work that writes them.

using BlockPages = std::array<int32_t, kernels::kNumPagedKinds>;
using PagedPools = std::array<PagePool*, kernels::kNumPagedKinds>;

// Bytes that the entries of one block take, of all paged kinds.
int64_t BlockBytes(const kernels::KvLayout& layout);

// The entries of the block that starts `first_token` tokens into its pages; -1: no page of a kind.
absl::StatusOr<SharedBytes> ReadBlock(const kernels::KvLayout& layout, const PagedPools& pools,
                                      const BlockPages& pages, int64_t first_token);
// DataLoss: the bytes are not those of their sum.
absl::Status WriteBlock(const kernels::KvLayout& layout, const PagedPools& pools,
                        const BlockPages& pages, int64_t first_token, const HostBytes& block);

// The first `bytes` of a page.
absl::StatusOr<SharedBytes> ReadPage(const PagePool& pool, int32_t page, int64_t bytes);
absl::Status WritePage(PagePool& pool, int32_t page, const HostBytes& bytes);

}  // namespace isthmus::kv
