// SPDX-License-Identifier: Apache-2.0
// A prefix index over small pools, and sequences that hold pages of them, for tests.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "services/kv/prefix_index.h"

namespace isthmus::kv {

using kernels::kNumPagedKinds;

inline constexpr int64_t kBlock = kPrefixBlockTokens;

inline kernels::KvLayout LayoutOf(int page_tokens) {
  kernels::KvGeometry geometry;
  geometry.compress_ratios = {4, 128};
  geometry.head_dim = 128;
  geometry.index_head_dim = 32;
  geometry.window = 8;
  geometry.page_tokens = page_tokens;
  return *kernels::KvLayout::Create(geometry);
}

// Pools and an index over them.
struct Bench {
  Bench(int page_tokens, int32_t num_pages, const PrefixOptions& options, int64_t max_blocks = 1000)
      : layout(LayoutOf(page_tokens)) {
    for (int k = 0; k < kNumPagedKinds; ++k) {
      const auto bytes = layout.kinds[static_cast<size_t>(k)].bytes();
      pages[static_cast<size_t>(k)] = *PagePool::Create("pages", bytes, num_pages);
      pools.pages[static_cast<size_t>(k)] = pages[static_cast<size_t>(k)].get();
    }
    snapshots = *PagePool::Create("snapshot", 4096, options.num_snapshots);
    pools.snapshots = snapshots.get();
    index = std::make_unique<PrefixIndex>(layout, pools, options, max_blocks);
  }

  const kernels::KvLayout layout;
  std::array<std::unique_ptr<PagePool>, kNumPagedKinds> pages;
  std::unique_ptr<PagePool> snapshots;
  PrefixIndex::Pools pools;
  std::unique_ptr<PrefixIndex> index;
};

// What a running sequence has: tokens under a salt, and pages that it holds.
struct Running {
  PrefixHash root;
  std::vector<int32_t> tokens;
  std::vector<PrefixHash> chain;
  std::array<std::vector<HeldPage>, kNumPagedKinds> pages;

  PrefixIndex::PageLists Lists() {
    PrefixIndex::PageLists lists;
    for (size_t k = 0; k < pages.size(); ++k) {
      numbers[k].clear();
      for (const HeldPage& page : pages[k]) numbers[k].push_back(page.page());
      lists[k] = numbers[k];
    }
    return lists;
  }
  std::array<std::vector<int32_t>, kNumPagedKinds> numbers;
};

inline Running RunningOf(const Bench& bench, const std::string& salt, std::vector<int32_t> tokens) {
  Running running;
  running.root = bench.index->RootOf(salt);
  running.tokens = std::move(tokens);
  ExtendChain(running.root, running.tokens, running.chain);
  return running;
}

// False when there are not enough even when all is evicted that can be; a thread that looks up may
// hold what could have been a moment ago.
inline bool TakePages(Bench& bench, Running& running) {
  const int64_t page_tokens = bench.layout.geometry.page_tokens;
  const auto wanted = (static_cast<int64_t>(running.tokens.size()) + page_tokens - 1) / page_tokens;
  std::array<int64_t, kNumPagedKinds> missing{};
  for (size_t k = 0; k < missing.size(); ++k) {
    missing[k] = wanted - static_cast<int64_t>(running.pages[k].size());
    if (bench.pools.pages[k]->num_available() < missing[k]) return false;
  }
  if (!bench.index->EvictUntil(missing)) return false;
  for (size_t k = 0; k < missing.size(); ++k) {
    const auto taken = bench.pools.pages[k]->Take(missing[k]);
    EXPECT_TRUE(taken.ok()) << taken.status();
    if (!taken.ok()) return false;
    for (const int32_t page : *taken) running.pages[k].emplace_back(bench.pools.pages[k], page);
  }
  return true;
}

inline void Insert(Bench& bench, Running& running) {
  bench.index->Insert(running.root, running.chain, running.tokens, running.Lists());
}

inline void Snapshot(Bench& bench, const PrefixHash& name, SnapshotReason reason) {
  auto snapshot = bench.index->TakeSnapshot();
  ASSERT_TRUE(snapshot.ok()) << snapshot.status();
  bench.index->AddSnapshot(name, *std::move(snapshot), reason);
}

// `blocks[i]` many equal ids for each block.
inline std::vector<int32_t> TokensOf(const std::vector<int32_t>& blocks, int64_t more = 0) {
  std::vector<int32_t> tokens;
  for (const int32_t id : blocks) tokens.insert(tokens.end(), static_cast<size_t>(kBlock), id);
  tokens.insert(tokens.end(), static_cast<size_t>(more), 9);
  return tokens;
}

}  // namespace isthmus::kv
