// SPDX-License-Identifier: Apache-2.0
#include "services/kv/host_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "services/base/check.h"
#include "services/base/crc32c.h"
#include "services/base/status_macros.h"

namespace isthmus::kv {
namespace {

int64_t SizeOf(const SharedBytes& bytes) {
  return bytes == nullptr ? 0 : static_cast<int64_t>(bytes->bytes.size());
}

int64_t SizeOf(const HostBlock& block) { return SizeOf(block.entries) + SizeOf(block.snapshot); }

// Calls copy(in the page, in the block, bytes) for the entries of a block's part of a page, layer
// by layer, data and scales.
template <typename Copy>
absl::Status ForEachRun(const kernels::CacheKind& kind, int64_t first_token, int64_t in_block,
                        Copy copy) {
  const int64_t entries = kPrefixBlockTokens / kind.tokens_per_entry;
  const int64_t first = first_token / kind.tokens_per_entry;
  int64_t layer_start = 0;
  for (size_t layer = 0; layer < kind.layers.size(); ++layer) {
    const int64_t scales = layer_start + int64_t{kind.entries} * kind.entry_data_bytes;
    for (const auto& [start, size] : {std::pair{layer_start, int64_t{kind.entry_data_bytes}},
                                      std::pair{scales, int64_t{kind.entry_scale_bytes}}}) {
      if (size == 0) continue;
      ISTHMUS_RETURN_IF_ERROR(copy(start + first * size, in_block, entries * size));
      in_block += entries * size;
    }
    layer_start += kind.layer_bytes();
  }
  return absl::OkStatus();
}

int64_t BytesOf(const kernels::CacheKind& kind) {
  if (kind.layers.empty()) return 0;
  return kPrefixBlockTokens / kind.tokens_per_entry * static_cast<int64_t>(kind.layers.size()) *
         (kind.entry_data_bytes + kind.entry_scale_bytes);
}

absl::Status Begin(int device) {
  return device == kHostMemory ? absl::OkStatus() : kernels::UseDevice(device);
}

absl::Status End(int device) {
  return device == kHostMemory ? absl::OkStatus() : kernels::DeviceStream().Synchronise();
}

absl::Status Down(int device, std::byte* host, const std::byte* page, int64_t bytes) {
  if (device != kHostMemory) return kernels::CopyToHost(host, page, bytes, nullptr);
  std::memcpy(host, page, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status Up(int device, std::byte* page, const std::byte* host, int64_t bytes) {
  if (device != kHostMemory) return kernels::CopyToDevice(page, host, bytes, nullptr);
  std::memcpy(page, host, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

uint32_t SumOf(const HostBytes& bytes) { return Crc32c(bytes.bytes.data(), bytes.bytes.size()); }

absl::Status CheckSum(const HostBytes& bytes) {
  const uint32_t sum = SumOf(bytes);
  if (sum == bytes.crc32c) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("host memory: the sum of ", bytes.bytes.size(),
                                          " bytes is ", sum, ", was ", bytes.crc32c));
}

}  // namespace

// ---- HostStore

const HostBlock* HostStore::Find(const PrefixHash& name, const PrefixHash& parent_name,
                                 std::span<const int32_t> tokens) const {
  const auto found = blocks_.find(name);
  if (found == blocks_.end()) return nullptr;
  const HostBlock& block = found->second;
  const bool is_same = block.parent_name == parent_name && std::ranges::equal(block.tokens, tokens);
  return is_same ? &block : nullptr;
}

void HostStore::Put(const HostBlock& block) {
  const auto [at, is_added] = blocks_.try_emplace(block.name, block);
  HostBlock& stored = at->second;
  if (is_added) {
    children_.emplace(block.parent_name, block.name);
    bytes_ += SizeOf(block);
  } else {
    if (stored.parent_name != block.parent_name || stored.tokens != block.tokens) return;
    by_use_.erase(FiledAs(stored));
    bytes_ -= SizeOf(stored);
    if (block.entries != nullptr) stored.entries = block.entries;
    if (block.snapshot != nullptr) stored.snapshot = block.snapshot;
    stored.last_use = std::max(stored.last_use, block.last_use);
    bytes_ += SizeOf(stored);
  }
  by_use_.insert(FiledAs(stored));
  while (bytes_ > max_bytes_) {
    const Filed oldest = *by_use_.begin();
    RemoveFrom({oldest.high, oldest.low});
  }
}

void HostStore::Touch(const PrefixHash& name, uint64_t last_use) {
  const auto found = blocks_.find(name);
  if (found == blocks_.end()) return;
  by_use_.erase(FiledAs(found->second));
  found->second.last_use = last_use;
  by_use_.insert(FiledAs(found->second));
}

void HostStore::RemoveOne(const PrefixHash& name) {
  const auto found = blocks_.find(name);
  if (found == blocks_.end()) return;
  const HostBlock& block = found->second;
  const auto [begin, end] = children_.equal_range(block.parent_name);
  for (auto child = begin; child != end; ++child) {
    if (child->second != name) continue;
    children_.erase(child);
    break;
  }
  by_use_.erase(FiledAs(block));
  bytes_ -= SizeOf(block);
  blocks_.erase(found);
}

void HostStore::RemoveFrom(const PrefixHash& name) {
  std::vector<PrefixHash> names = {name};
  while (!names.empty()) {
    const PrefixHash next = names.back();
    names.pop_back();
    RemoveOne(next);
    const auto [begin, end] = children_.equal_range(next);
    for (auto child = begin; child != end; ++child) names.push_back(child->second);
  }
}

void HostStore::CheckConservation() const {
  int64_t bytes = 0;
  for (const auto& [name, block] : blocks_) {
    ISTHMUS_CHECK(block.name == name && SizeOf(block) > 0);
    ISTHMUS_CHECK(by_use_.contains(FiledAs(block)));
    bytes += SizeOf(block);
  }
  for (const auto& [parent, child] : children_) {
    const auto found = blocks_.find(child);
    ISTHMUS_CHECK(found != blocks_.end() && found->second.parent_name == parent);
  }
  ISTHMUS_CHECK(bytes == bytes_ && bytes <= max_bytes_);
  ISTHMUS_CHECK(by_use_.size() == blocks_.size() && children_.size() == blocks_.size());
}

// ---- Copies

int64_t BlockBytes(const kernels::KvLayout& layout) {
  int64_t bytes = 0;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    bytes += BytesOf(layout.kinds[static_cast<size_t>(k)]);
  }
  return bytes;
}

absl::StatusOr<SharedBytes> ReadBlock(const kernels::KvLayout& layout, const PagedPools& pools,
                                      const BlockPages& pages, int64_t first_token) {
  const int device = pools[0]->arena().device();
  ISTHMUS_RETURN_IF_ERROR(Begin(device));
  auto block = std::make_shared<HostBytes>();
  block->bytes.resize(static_cast<size_t>(BlockBytes(layout)));
  int64_t start = 0;
  for (size_t k = 0; k < pages.size(); ++k) {
    if (pages[k] < 0) continue;
    const std::byte* page = pools[k]->address(pages[k]);
    ISTHMUS_RETURN_IF_ERROR(ForEachRun(
        layout.kinds[k], first_token, start, [&](int64_t in_page, int64_t in_block, int64_t bytes) {
          return Down(device, block->bytes.data() + in_block, page + in_page, bytes);
        }));
    start += BytesOf(layout.kinds[k]);
  }
  ISTHMUS_RETURN_IF_ERROR(End(device));
  block->crc32c = SumOf(*block);
  return block;
}

absl::Status WriteBlock(const kernels::KvLayout& layout, const PagedPools& pools,
                        const BlockPages& pages, int64_t first_token, const HostBytes& block) {
  ISTHMUS_RETURN_IF_ERROR(CheckSum(block));
  ISTHMUS_CHECK(static_cast<int64_t>(block.bytes.size()) == BlockBytes(layout));
  int64_t start = 0;
  for (size_t k = 0; k < pages.size(); ++k) {
    if (pages[k] < 0) continue;
    const kv::Arena& arena = pools[k]->arena();
    ISTHMUS_RETURN_IF_ERROR(OnEveryRank(arena, [&](int rank) {
      std::byte* const page = pools[k]->address_of(rank, pages[k]);
      return ForEachRun(layout.kinds[k], first_token, start,
                        [&](int64_t in_page, int64_t in_block, int64_t bytes) {
                          return Up(arena.device(), page + in_page, block.bytes.data() + in_block,
                                    bytes);
                        });
    }));
    start += BytesOf(layout.kinds[k]);
  }
  return absl::OkStatus();
}

absl::StatusOr<SharedBytes> ReadPage(const PagePool& pool, int32_t page, int64_t bytes) {
  ISTHMUS_CHECK(bytes <= pool.page_bytes());
  const int device = pool.arena().device();
  ISTHMUS_RETURN_IF_ERROR(Begin(device));
  auto copy = std::make_shared<HostBytes>();
  copy->bytes.resize(static_cast<size_t>(bytes));
  ISTHMUS_RETURN_IF_ERROR(Down(device, copy->bytes.data(), pool.address(page), bytes));
  ISTHMUS_RETURN_IF_ERROR(End(device));
  copy->crc32c = SumOf(*copy);
  return copy;
}

absl::Status WritePage(PagePool& pool, int32_t page, const HostBytes& bytes) {
  ISTHMUS_RETURN_IF_ERROR(CheckSum(bytes));
  const auto size = static_cast<int64_t>(bytes.bytes.size());
  ISTHMUS_CHECK(size <= pool.page_bytes());
  return OnEveryRank(pool.arena(), [&](int rank) {
    return Up(pool.arena().device(), pool.address_of(rank, page), bytes.bytes.data(), size);
  });
}

}  // namespace isthmus::kv
