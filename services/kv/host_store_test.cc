// SPDX-License-Identifier: Apache-2.0
#include "services/kv/host_store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <random>
#include <string>

#include "services/kv/sequence_cache.h"

namespace isthmus::kv {
namespace {

SharedBytes Bytes(size_t size) {
  auto bytes = std::make_shared<HostBytes>();
  bytes->bytes.resize(size);
  return bytes;
}

PrefixHash Name(uint64_t number) { return {number * 7, number}; }

HostBlock Block(uint64_t name, uint64_t parent, uint64_t last_use, size_t entries,
                size_t snapshot = 0) {
  HostBlock block = {.name = Name(name), .parent_name = Name(parent), .last_use = last_use};
  block.tokens.fill(static_cast<int32_t>(name));
  if (entries > 0) block.entries = Bytes(entries);
  if (snapshot > 0) block.snapshot = Bytes(snapshot);
  return block;
}

const HostBlock* Find(const HostStore& store, uint64_t name, uint64_t parent) {
  return store.Find(Name(name), Name(parent), Block(name, parent, 0, 0).tokens);
}

TEST(HostStoreTest, FindsOnlyTheSameTokensBehindTheSamePrefix) {
  HostStore store(1000);
  store.Put(Block(2, 1, 5, 100));
  ASSERT_NE(Find(store, 2, 1), nullptr);
  EXPECT_EQ(Find(store, 2, 3), nullptr);
  EXPECT_EQ(store.Find(Name(2), Name(1), Block(3, 1, 0, 0).tokens), nullptr);
  EXPECT_TRUE(store.HasChild(Name(1)));
  EXPECT_FALSE(store.HasChild(Name(2)));
}

TEST(HostStoreTest, AddsWhatWasMissing) {
  HostStore store(1000);
  store.Put(Block(2, 1, 5, 0, 30));
  EXPECT_EQ(Find(store, 2, 1)->entries, nullptr);
  store.Put(Block(2, 1, 4, 100));
  EXPECT_EQ(Find(store, 2, 1)->entries->bytes.size(), 100u);
  EXPECT_EQ(Find(store, 2, 1)->snapshot->bytes.size(), 30u);
  EXPECT_EQ(Find(store, 2, 1)->last_use, 5u);
  EXPECT_EQ(store.bytes(), 130);
  store.CheckConservation();
}

TEST(HostStoreTest, ForgetsTheOldestConversationAsAWhole) {
  HostStore store(500);
  // Two conversations behind a shared block; leaves come first, as they are evicted.
  store.Put(Block(12, 11, 3, 100, 10));
  store.Put(Block(11, 10, 2, 100));
  store.Put(Block(22, 10, 9, 100, 10));
  store.Put(Block(10, 0, 8, 100));
  EXPECT_EQ(store.num_blocks(), 4);
  store.Put(Block(30, 0, 10, 100));
  EXPECT_EQ(Find(store, 11, 10), nullptr);
  EXPECT_EQ(Find(store, 12, 11), nullptr);
  EXPECT_NE(Find(store, 22, 10), nullptr);
  EXPECT_NE(Find(store, 10, 0), nullptr);
  EXPECT_NE(Find(store, 30, 0), nullptr);
  store.CheckConservation();
}

TEST(HostStoreTest, HoldsNothingThatIsLargerThanItself) {
  HostStore store(50);
  store.Put(Block(2, 1, 5, 100));
  EXPECT_EQ(store.num_blocks(), 0);
  EXPECT_EQ(store.bytes(), 0);
  store.CheckConservation();
}

// Against a list of blocks without an order or links of its own.
TEST(HostStoreTest, AgreesWithANaiveModel) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    HostStore store(2000);
    std::map<uint64_t, HostBlock> naive;
    const auto remove = [&](uint64_t name, const auto& self) -> void {
      naive.erase(name);
      std::vector<uint64_t> behind;
      for (const auto& [other, block] : naive) {
        if (block.parent_name == Name(name)) behind.push_back(other);
      }
      for (const uint64_t other : behind) self(other, self);
    };
    const auto bytes = [&] {
      int64_t sum = 0;
      for (const auto& [name, block] : naive) {
        if (block.entries != nullptr) sum += static_cast<int64_t>(block.entries->bytes.size());
        if (block.snapshot != nullptr) sum += static_cast<int64_t>(block.snapshot->bytes.size());
      }
      return sum;
    };
    uint64_t clock = 0;
    for (int step = 0; step < 600; ++step) {
      // Block n lies behind block n / 2, so that 63 names make a tree.
      const uint64_t name = random() % 63 + 1;
      const uint32_t kind = random() % 8;
      if (kind == 0) {
        store.RemoveFrom(Name(name));
        remove(name, remove);
      } else if (kind == 1) {
        store.Touch(Name(name), ++clock);
        if (naive.contains(name)) naive[name].last_use = clock;
      } else {
        HostBlock block = Block(name, name / 2, ++clock, random() % 3 * 60, random() % 2 * 40);
        if (block.entries == nullptr && block.snapshot == nullptr) continue;
        store.Put(block);
        HostBlock& stored = naive.try_emplace(name, block).first->second;
        if (block.entries != nullptr) stored.entries = block.entries;
        if (block.snapshot != nullptr) stored.snapshot = block.snapshot;
        stored.last_use = clock;
        while (bytes() > 2000) {
          const auto oldest = std::ranges::min_element(
              naive, {}, [](const auto& entry) { return entry.second.last_use; });
          remove(oldest->first, remove);
        }
      }
      store.CheckConservation();
      ASSERT_EQ(store.bytes(), bytes()) << "seed " << seed << " step " << step;
      ASSERT_EQ(store.num_blocks(), static_cast<int64_t>(naive.size())) << "seed " << seed;
      for (const auto& [other, block] : naive) {
        const HostBlock* found = Find(store, other, other / 2);
        ASSERT_NE(found, nullptr) << "seed " << seed << " step " << step << " block " << other;
        ASSERT_EQ(found->entries, block.entries);
        ASSERT_EQ(found->snapshot, block.snapshot);
      }
    }
  }
}

// ---- Copies

class BlockCopyTest : public testing::Test {
 protected:
  BlockCopyTest() {
    kernels::KvGeometry geometry;
    geometry.compress_ratios = {4, 128, 4, 0};
    layout_ = *kernels::KvLayout::Create(geometry);
    pool_ = *CachePool::Create(layout_, 1024, 2);
  }

  kernels::KvLayout layout_;
  std::unique_ptr<CachePool> pool_;
};

TEST_F(BlockCopyTest, MovesTheEntriesOfOneBlockAndNoOthers) {
  const PagedPools pools = pool_->paged_pools();
  std::mt19937 random(3);
  for (PagePool* pages : pools) {
    for (int64_t i = 0; i < pages->page_bytes(); ++i) {
      pages->address(0)[i] = static_cast<std::byte>(random());
      pages->address(1)[i] = std::byte{0x55};
    }
  }
  for (const int64_t block : {0, 1}) {
    const auto read = ReadBlock(layout_, pools, {0, 0, 0}, 128 * block);
    ASSERT_TRUE(read.ok()) << read.status();
    ASSERT_TRUE(WriteBlock(layout_, pools, {1, 1, 1}, 128 * block, **read).ok());
    for (size_t k = 0; k < pools.size(); ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      const int64_t entries = 128 / layout_.kinds[k].tokens_per_entry;
      for (const int layer : layout_.kinds[k].layers) {
        const kernels::EntryPlane plane = layout_.Plane(kind, layer);
        for (int64_t e = 0; e < plane.entries; ++e) {
          const bool is_moved = e < entries * (block + 1);
          EXPECT_EQ(
              std::memcmp(plane.data(pools[k]->address(0), e), plane.data(pools[k]->address(1), e),
                          static_cast<size_t>(plane.data_bytes)) == 0,
              is_moved)
              << k << " layer " << layer << " entry " << e;
        }
      }
    }
  }
  for (PagePool* pages : pools) {
    EXPECT_EQ(
        std::memcmp(pages->address(0), pages->address(1), static_cast<size_t>(pages->page_bytes())),
        0);
  }
}

TEST_F(BlockCopyTest, RefusesBytesThatHaveChanged) {
  const PagedPools pools = pool_->paged_pools();
  HostBytes block = **ReadBlock(layout_, pools, {0, 0, 0}, 128);
  block.bytes[block.bytes.size() / 2] ^= std::byte{1};
  const absl::Status status = WriteBlock(layout_, pools, {1, 1, 1}, 128, block);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  HostBytes slot = **ReadPage(pool_->slots(), 0, 100);
  slot.bytes[7] ^= std::byte{128};
  EXPECT_EQ(WritePage(pool_->slots(), 1, slot).code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace isthmus::kv
