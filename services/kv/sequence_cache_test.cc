// SPDX-License-Identifier: Apache-2.0
#include "services/kv/sequence_cache.h"

#include <cstring>

#include "gtest/gtest.h"

namespace isthmus::kv {
namespace {

using kernels::kCsaKv;
using kernels::kHcaKv;
using kernels::KvGeometry;
using kernels::KvLayout;

KvLayout Layout(std::vector<int> ratios = {0, 4, 128}) {
  KvGeometry geometry;
  geometry.compress_ratios = std::move(ratios);
  return *KvLayout::Create(geometry);
}

TEST(PagePoolTest, TakesAllOrNothing) {
  auto pool = *PagePool::Create("test", 64, 3);
  EXPECT_EQ(pool->Take(4).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool->num_free(), 3);
  EXPECT_EQ(pool->Take(3)->size(), 3u);
  EXPECT_EQ(pool->num_free(), 0);
  pool->CheckConservation();
}

TEST(PagePoolTest, FreesASharedPageWithItsLastHolder) {
  auto pool = *PagePool::Create("test", 64, 1);
  const int32_t page = (*pool->Take(1))[0];
  pool->Hold(page);
  pool->Release(page);
  EXPECT_EQ(pool->num_free(), 0);
  pool->Release(page);
  EXPECT_EQ(pool->num_free(), 1);
}

TEST(PagePoolDeathTest, EndsTheProcessOnASecondRelease) {
  auto pool = *PagePool::Create("test", 64, 1);
  const int32_t page = (*pool->Take(1))[0];
  pool->Release(page);
  EXPECT_DEATH(pool->Release(page), "check failed");
}

TEST(KvLayoutTest, HasTheSizesOfTheSpecification) {
  // The 43-layer model: 3066 + 91.25 + 357 bytes per token (specification 4.3, fp4 index keys).
  KvGeometry geometry;
  geometry.compress_ratios = {0, 0};
  for (int i = 2; i < 43; ++i) geometry.compress_ratios.push_back(i % 2 == 0 ? 4 : 128);
  const KvLayout layout = *KvLayout::Create(geometry);
  EXPECT_EQ(layout.kinds[kCsaKv].bytes(), 21 * 64 * 584);
  EXPECT_EQ(layout.kinds[kHcaKv].bytes(), 20 * 2 * 584);
  EXPECT_EQ(layout.kinds[kernels::kIndexKey].bytes(), 21 * 64 * 68);
  EXPECT_EQ(layout.kinds[kernels::kWindow].bytes(), 3214336);
  EXPECT_EQ(layout.kinds[kernels::kCsaState].bytes() + layout.kinds[kernels::kIndexState].bytes(),
            1720320);
  EXPECT_EQ(layout.kinds[kernels::kHcaState].bytes(), 10485760);
}

TEST(KvLayoutTest, FingerprintTellsGeometryAndArithmeticApart) {
  KvGeometry geometry;
  geometry.compress_ratios = {0, 4, 128};
  const uint64_t reference = KvLayout::Create(geometry)->fingerprint;
  EXPECT_EQ(KvLayout::Create(geometry)->fingerprint, reference);
  geometry.page_tokens = 128;
  EXPECT_NE(KvLayout::Create(geometry)->fingerprint, reference);
  geometry.page_tokens = 256;
  geometry.arithmetic = kernels::Arithmetic::kMath;
  EXPECT_NE(KvLayout::Create(geometry)->fingerprint, reference);
}

TEST(KvLayoutTest, RefusesBadGeometryWithTheValue) {
  KvGeometry geometry;
  geometry.compress_ratios = {0, 5};
  EXPECT_NE(KvLayout::Create(geometry).status().message().find("is 5"), absl::string_view::npos);
  geometry.compress_ratios = {0};
  geometry.page_tokens = 200;
  EXPECT_NE(KvLayout::Create(geometry).status().message().find("200"), absl::string_view::npos);
}

TEST(KvLayoutTest, PlanesOfAPageDoNotOverlapAndFillIt) {
  const KvLayout layout = Layout({4, 128, 4});
  const kernels::EntryPlane first = layout.Plane(kCsaKv, 0);
  const kernels::EntryPlane second = layout.Plane(kCsaKv, 2);
  EXPECT_EQ(first.data_offset, 0);
  EXPECT_EQ(first.scale_offset, 64 * 576);
  EXPECT_EQ(second.data_offset, 64 * 584);
  EXPECT_EQ(second.scale_offset + 64 * 8, layout.kinds[kCsaKv].bytes());
}

TEST(SequenceCacheTest, GivesEverythingBackWhenItDies) {
  const KvLayout layout = Layout();
  auto pool = *CachePool::Create(layout, 1024, 2);
  {
    SequenceCache cache = *pool->Open();
    ASSERT_TRUE(cache.Reserve(300).ok());
    EXPECT_EQ(cache.capacity_tokens(), 512);
    EXPECT_EQ(cache.pages(kCsaKv).size(), 2u);
    SequenceCache moved = std::move(cache);
    EXPECT_FALSE(cache.is_open());  // NOLINT(bugprone-use-after-move): the test is about that
    EXPECT_EQ(moved.pages(kHcaKv).size(), 2u);
    pool->CheckConservation();
  }
  EXPECT_EQ(pool->pages(kCsaKv).num_free(), 4);
  EXPECT_EQ(pool->slots().num_free(), 2);
}

TEST(SequenceCacheTest, ReservesInEveryKindOrInNone) {
  auto pool = *CachePool::Create(Layout(), 512, 1);
  // Drain one kind behind the sequence's back.
  ASSERT_TRUE(pool->pages(kernels::kIndexKey).Take(2).ok());
  SequenceCache cache = *pool->Open();
  EXPECT_EQ(cache.Reserve(256).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(pool->pages(kCsaKv).num_free(), 2);
  EXPECT_EQ(cache.capacity_tokens(), 0);
}

TEST(SequenceCacheTest, AReusedSlotIsClear) {
  auto pool = *CachePool::Create(Layout(), 256, 1);
  {
    SequenceCache cache = *pool->Open();
    ASSERT_TRUE(cache.Reserve(1).ok());
    std::memset(cache.View(0, 1).state, 0x5a, static_cast<size_t>(pool->slots().page_bytes()));
  }
  SequenceCache cache = *pool->Open();
  ASSERT_TRUE(cache.Reserve(1).ok());
  const std::byte* state = cache.View(0, 1).state;
  for (int64_t i = 0; i < pool->slots().page_bytes(); ++i) ASSERT_EQ(state[i], std::byte{0}) << i;
}

TEST(SequenceCacheTest, RefusesMoreTokensThanItHasRoomFor) {
  auto pool = *CachePool::Create(Layout(), 256, 1);
  SequenceCache cache = *pool->Open();
  ASSERT_TRUE(cache.Reserve(10).ok());
  EXPECT_TRUE(cache.SetNumTokens(256).ok());
  EXPECT_EQ(cache.SetNumTokens(257).code(), absl::StatusCode::kInvalidArgument);
}

// ---- Forks.

void Fill(PagePool& pool, int32_t page, int value) {
  std::memset(pool.address(page), value, static_cast<size_t>(pool.page_bytes()));
}

TEST(SequenceCacheForkTest, SharesFullPagesAndCopiesTheRest) {
  for (const bool reserves_first : {false, true}) {
    for (const int64_t num_tokens : {0, 1, 255, 256, 257, 512, 700}) {
      auto pool = *CachePool::Create(Layout(), 4096, 2);
      SequenceCache parent = *pool->Open();
      ASSERT_TRUE(parent.Reserve(700).ok());
      ASSERT_TRUE(parent.SetNumTokens(num_tokens).ok());
      for (const auto kind : {kCsaKv, kHcaKv}) {
        int value = 1;
        for (const int32_t page : parent.pages(kind)) Fill(pool->pages(kind), page, value++);
      }
      Fill(pool->slots(), parent.slot(), 77);
      SequenceCache fork = *pool->Open();
      if (reserves_first) {
        ASSERT_TRUE(fork.Reserve(600).ok());
      }
      ASSERT_TRUE(parent.ForkInto(fork).ok());
      const auto num_full = static_cast<size_t>(num_tokens / 256);
      EXPECT_EQ(fork.num_tokens(), num_tokens);
      EXPECT_EQ(fork.num_shared_tokens(), static_cast<int64_t>(num_full * 256));
      EXPECT_EQ(parent.num_shared_tokens(), static_cast<int64_t>(num_full * 256));
      EXPECT_GE(fork.capacity_tokens(), num_tokens);
      EXPECT_EQ(*pool->slots().address(fork.slot()), std::byte{77});
      for (const auto kind : {kCsaKv, kHcaKv}) {
        EXPECT_EQ(static_cast<int64_t>(fork.pages(kind).size()),
                  pool->layout().PagesFor(kind, fork.capacity_tokens()));
        for (size_t page = 0; page < num_full; ++page) {
          EXPECT_EQ(fork.pages(kind)[page], parent.pages(kind)[page]);
        }
        if (num_tokens % 256 == 0) continue;
        const int32_t rest = fork.pages(kind)[num_full];
        EXPECT_NE(rest, parent.pages(kind)[num_full]);
        EXPECT_EQ(*pool->pages(kind).address(rest), std::byte(num_full + 1));
        Fill(pool->pages(kind), rest, 99);
        EXPECT_EQ(*pool->pages(kind).address(parent.pages(kind)[num_full]),
                  std::byte(num_full + 1));
      }
      // Either may end first.
      if (reserves_first) {
        parent = SequenceCache();
      } else {
        fork = SequenceCache();
      }
      pool->CheckConservation();
      parent = SequenceCache();
      fork = SequenceCache();
      pool->CheckConservation();
      EXPECT_EQ(pool->pages(kCsaKv).num_free(), pool->pages(kCsaKv).num_pages());
      EXPECT_EQ(pool->slots().num_free(), 2);
    }
  }
}

TEST(SequenceCacheForkTest, LeavesNothingBehindWhenThereIsNoPageForTheCopy) {
  auto pool = *CachePool::Create(Layout(), 512, 2);
  SequenceCache parent = *pool->Open();
  ASSERT_TRUE(parent.Reserve(512).ok());
  ASSERT_TRUE(parent.SetNumTokens(300).ok());
  SequenceCache fork = *pool->Open();
  EXPECT_EQ(parent.ForkInto(fork).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(fork.num_tokens(), 0);
  EXPECT_TRUE(fork.pages(kCsaKv).empty());
  parent = SequenceCache();
  EXPECT_EQ(pool->pages(kCsaKv).num_free(), pool->pages(kCsaKv).num_pages());
}

}  // namespace
}  // namespace isthmus::kv
