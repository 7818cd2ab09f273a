// SPDX-License-Identifier: Apache-2.0
// Every rank of a group has the bytes of the cache that rank 0 has, whoever wrote them: what opens,
// forks, shares and restores a sequence writes on all of them.
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/testing/device.h"
#include "services/engine/rank_forward.h"
#include "services/kv/host_store.h"
#include "services/kv/page_copy.h"

namespace isthmus::engine {
namespace {

constexpr int kRanks = 3;
constexpr int32_t kPageTokens = 256;

kernels::KvLayout Layout() {
  kernels::KvGeometry geometry;
  geometry.compress_ratios = {0, 4, 128};
  geometry.page_tokens = kPageTokens;
  return *kernels::KvLayout::Create(geometry);
}

class RankCachesTest : public testing::Test {
 protected:
  void SetUp() override {
    ISTHMUS_REQUIRE_DEVICE();
    const std::vector<int> others(kRanks - 1, kernels::NumDevices() > 1 ? 1 : 0);
    kv::PrefixOptions prefixes;
    prefixes.num_snapshots = 2;
    pool_ = *kv::CachePool::Create(Layout(), 4 * kPageTokens, 3, /*device=*/0, prefixes, others);
  }

  // As a step of all ranks does it.
  void Fill(kv::PagePool& pages, int32_t page, int seed) {
    std::vector<uint8_t> bytes(static_cast<size_t>(pages.page_bytes()));
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(i * 7 + i / 251 + static_cast<size_t>(seed));
    }
    ASSERT_TRUE(kv::OnEveryRank(pages.arena(), [&](int rank) {
                  return kernels::CopyToDevice(pages.address_of(rank, page), bytes.data(),
                                               pages.page_bytes(), nullptr);
                }).ok());
  }
  void Fill(const kv::SequenceCache& cache, int seed) {
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      for (const int32_t page : cache.pages(kind)) Fill(pool_->pages(kind), page, seed + page);
    }
    Fill(pool_->slots(), cache.slot(), seed + 50);
  }

  static std::vector<uint8_t> Bytes(const kv::PagePool& pages, int32_t page, int rank) {
    std::vector<uint8_t> bytes(static_cast<size_t>(pages.page_bytes()));
    EXPECT_TRUE(kernels::UseDevice(pages.arena().device_of(rank)).ok());
    EXPECT_TRUE(
        kernels::CopyToHost(bytes.data(), pages.address_of(rank, page), pages.page_bytes(), nullptr)
            .ok());
    EXPECT_TRUE(kernels::DeviceStream().Synchronise().ok());
    return bytes;
  }
  // Whether all ranks have the same, which is not nothing unless `is_clear`.
  static void ExpectAlike(const kv::PagePool& pages, int32_t page, bool is_clear = false) {
    const std::vector<uint8_t> first = Bytes(pages, page, 0);
    EXPECT_EQ(std::accumulate(first.begin(), first.end(), int64_t{0}) == 0, is_clear);
    for (int rank = 1; rank < kRanks; ++rank) {
      EXPECT_TRUE(Bytes(pages, page, rank) == first) << "rank " << rank;
    }
  }
  void ExpectAlike(const kv::SequenceCache& cache) {
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      for (const int32_t page : cache.pages(kind)) ExpectAlike(pool_->pages(kind), page);
    }
    ExpectAlike(pool_->slots(), cache.slot());
  }

  std::unique_ptr<kv::CachePool> pool_;
};

TEST_F(RankCachesTest, HaveTheSizeOfTheFirst) {
  const std::vector<CacheCopy> copies = CopiesOf(*pool_, 2);
  EXPECT_EQ(copies.size(), kernels::kNumPagedKinds + 1u);
  for (const CacheCopy& copy : copies) {
    EXPECT_NE(copy.copy, copy.whole);
    EXPECT_GT(copy.bytes, 0);
  }
  EXPECT_TRUE(CopiesOf(*pool_, 0).empty());
}

TEST_F(RankCachesTest, AreClearedAndForkedAlike) {
  kv::SequenceCache cache = *pool_->Open();
  ExpectAlike(pool_->slots(), cache.slot(), /*is_clear=*/true);
  ASSERT_TRUE(cache.Reserve(kPageTokens + 100).ok());
  Fill(cache, 1);
  ASSERT_TRUE(cache.SetNumTokens(kPageTokens + 100).ok());
  kv::SequenceCache fork = *pool_->Open();
  ASSERT_TRUE(cache.ForkInto(fork).ok());
  ASSERT_EQ(fork.pages(kernels::kCsaKv).size(), 2u);
  EXPECT_NE(fork.pages(kernels::kCsaKv)[1], cache.pages(kernels::kCsaKv)[1]);
  ExpectAlike(fork);
  const int32_t slot = cache.slot();
  cache.Reset();
  ExpectAlike(pool_->slots(), slot, /*is_clear=*/true);
}

TEST_F(RankCachesTest, TakeSharedEntriesAndSnapshotsAlike) {
  kv::SequenceCache cache = *pool_->Open();
  ASSERT_TRUE(cache.Reserve(kPageTokens).ok());
  Fill(cache, 2);
  ASSERT_TRUE(cache.SetNumTokens(kPrefixBlockTokens).ok());
  const std::vector<int32_t> tokens(kPrefixBlockTokens, 9);
  const PrefixHash root = PrefixRoot("", pool_->layout().fingerprint, 1);
  std::vector<PrefixHash> chain;
  ExtendChain(root, tokens, chain);
  kv::PrefixIndex& index = *pool_->prefixes();
  index.Insert(root, chain, tokens, cache.page_lists());
  index.AddSnapshot(chain.back(), pool_->TakeSnapshot(cache).value(), kv::SnapshotReason::kTail);
  kv::PrefixHit hit = index.FindState(root, chain, tokens, kPrefixBlockTokens);
  ASSERT_EQ(hit.num_tokens, kPrefixBlockTokens);
  // The hit ends inside its page, whose entries are copied.
  kv::SequenceCache other = *pool_->Open();
  ASSERT_TRUE(other.Adopt(std::move(hit)).ok());
  EXPECT_NE(other.pages(kernels::kCsaKv)[0], cache.pages(kernels::kCsaKv)[0]);
  ExpectAlike(other);
}

TEST_F(RankCachesTest, TakeWhatComesFromTheHostAlike) {
  kv::SequenceCache cache = *pool_->Open();
  ASSERT_TRUE(cache.Reserve(2 * kPageTokens).ok());
  Fill(cache, 3);
  kv::BlockPages from{};
  kv::BlockPages to{};
  for (size_t k = 0; k < from.size(); ++k) {
    from[k] = cache.pages(static_cast<kernels::CacheKindIndex>(k))[0];
    to[k] = cache.pages(static_cast<kernels::CacheKindIndex>(k))[1];
  }
  const kv::SharedBytes block =
      kv::ReadBlock(pool_->layout(), pool_->paged_pools(), from, kPrefixBlockTokens).value();
  ASSERT_TRUE(kv::WriteBlock(pool_->layout(), pool_->paged_pools(), to, 0, *block).ok());
  for (size_t k = 0; k < to.size(); ++k) ExpectAlike(*pool_->paged_pools()[k], to[k]);
  const kv::SharedBytes again = kv::ReadBlock(pool_->layout(), pool_->paged_pools(), to, 0).value();
  EXPECT_TRUE(again->bytes == block->bytes);

  kv::PagePool& slots = pool_->slots();
  const kv::SharedBytes state = kv::ReadPage(slots, cache.slot(), slots.page_bytes()).value();
  kv::SequenceCache other = *pool_->Open();
  ASSERT_TRUE(kv::WritePage(slots, other.slot(), *state).ok());
  ExpectAlike(slots, other.slot());
  EXPECT_TRUE(Bytes(slots, other.slot(), 1) == Bytes(slots, cache.slot(), 0));
}

}  // namespace
}  // namespace isthmus::engine
