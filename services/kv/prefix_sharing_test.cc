// SPDX-License-Identifier: Apache-2.0
// Sequences that share pages through the prefix index of their pool.
#include <cstring>
#include <optional>

#include "gtest/gtest.h"
#include "services/kv/page_copy.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::kv {
namespace {

using kernels::CacheKindIndex;
using kernels::kCsaKv;
using kernels::kNumPagedKinds;

class PrefixSharingTest : public testing::TestWithParam<int> {
 protected:
  PrefixSharingTest() {
    kernels::KvGeometry geometry;
    geometry.compress_ratios = {0, 4, 128, 4};
    geometry.page_tokens = GetParam();
    layout_ = *kernels::KvLayout::Create(geometry);
    pool_ = *CachePool::Create(layout_, 2048, 3, kHostMemory, {.num_snapshots = 4});
  }

  static std::vector<int32_t> Tokens(int64_t count, int32_t last = 0) {
    std::vector<int32_t> tokens(static_cast<size_t>(count));
    for (size_t t = 0; t < tokens.size(); ++t) tokens[t] = static_cast<int32_t>(t % 997);
    if (count > 0) tokens.back() += last;
    return tokens;
  }

  std::vector<PrefixHash> ChainOf(const std::vector<int32_t>& tokens) const {
    std::vector<PrefixHash> chain;
    ExtendChain(root(), tokens, chain);
    return chain;
  }
  PrefixHash root() const { return pool_->prefixes()->RootOf(""); }

  // A sequence whose bytes are `mark`, published with a snapshot at the end of its last block.
  SequenceCache Publish(const std::vector<int32_t>& tokens, int mark) {
    SequenceCache cache = *pool_->Open();
    const auto size = static_cast<int64_t>(tokens.size());
    EXPECT_TRUE(cache.Reserve(size).ok());
    for (int k = 0; k < kNumPagedKinds; ++k) {
      const auto kind = static_cast<CacheKindIndex>(k);
      for (const int32_t page : cache.pages(kind)) {
        std::memset(pool_->pages(kind).address(page), mark,
                    static_cast<size_t>(pool_->pages(kind).page_bytes()));
      }
    }
    std::memset(pool_->slots().address(cache.slot()), mark,
                static_cast<size_t>(layout_.state_slot_bytes));
    const std::vector<PrefixHash> chain = ChainOf(tokens);
    pool_->prefixes()->Insert(root(), chain, tokens, cache.page_lists());
    EXPECT_TRUE(cache.SetNumTokens(static_cast<int64_t>(chain.size()) * 128).ok());
    auto snapshot = pool_->TakeSnapshot(cache);
    EXPECT_TRUE(snapshot.ok()) << snapshot.status();
    pool_->prefixes()->AddSnapshot(chain.back(), *std::move(snapshot), SnapshotReason::kTail);
    return cache;
  }

  PrefixHit Find(const std::vector<int32_t>& tokens) {
    return pool_->prefixes()->FindState(root(), ChainOf(tokens), tokens,
                                        static_cast<int64_t>(tokens.size()) - 1);
  }

  // Entries of the first `num_tokens` tokens are `mark`, and nothing else of the page.
  void ExpectCopied(CacheKindIndex kind, int32_t page, int64_t num_tokens, int mark) {
    const std::byte* base = pool_->pages(kind).address(page);
    for (const int layer : layout_.kinds[kind].layers) {
      const kernels::EntryPlane plane = layout_.Plane(kind, layer);
      const int64_t copied = num_tokens / layout_.kinds[kind].tokens_per_entry;
      for (int64_t entry = 0; entry < plane.entries; ++entry) {
        const int want = entry < copied ? mark : 0;
        const std::byte* at = base + plane.data_offset + entry * plane.data_bytes;
        ASSERT_EQ(std::to_integer<int>(at[0]), want) << "data of entry " << entry;
        ASSERT_EQ(std::to_integer<int>(at[plane.data_bytes - 1]), want);
        const std::byte* scale = base + plane.scale_offset + entry * plane.scale_bytes;
        ASSERT_EQ(std::to_integer<int>(scale[0]), want) << "scales of entry " << entry;
        ASSERT_EQ(std::to_integer<int>(scale[plane.scale_bytes - 1]), want);
      }
    }
  }

  kernels::KvLayout layout_;
  std::unique_ptr<CachePool> pool_;
};

TEST_P(PrefixSharingTest, FullPagesAreSharedAndTheLastPartIsCopied) {
  const int64_t page_tokens = GetParam();
  for (const int64_t num_blocks : {1, 2, 3, 4, 5}) {
    SequenceCache first = Publish(Tokens(num_blocks * 128), 0x11);
    SequenceCache second = *pool_->Open();
    ASSERT_TRUE(second.Adopt(Find(Tokens(num_blocks * 128 + 1))).ok());
    const int64_t hit = num_blocks * 128;
    EXPECT_EQ(second.num_tokens(), hit);
    EXPECT_EQ(second.num_shared_tokens(), hit / page_tokens * page_tokens);
    EXPECT_EQ(second.capacity_tokens(), (hit + page_tokens - 1) / page_tokens * page_tokens);
    for (int k = 0; k < kNumPagedKinds; ++k) {
      const auto kind = static_cast<CacheKindIndex>(k);
      const size_t full = static_cast<size_t>(hit / page_tokens);
      ASSERT_EQ(second.pages(kind).size(),
                static_cast<size_t>(second.capacity_tokens()) / static_cast<size_t>(page_tokens));
      for (size_t i = 0; i < full; ++i) EXPECT_EQ(second.pages(kind)[i], first.pages(kind)[i]);
      if (hit % page_tokens == 0) continue;
      EXPECT_NE(second.pages(kind)[full], first.pages(kind)[full]);
      ExpectCopied(kind, second.pages(kind)[full], hit % page_tokens, 0x11);
    }
    // All of the slot but the rows of ratio 128, which lie behind the rest.
    const std::byte* state = pool_->slots().address(second.slot());
    const int64_t copied = SnapshotBytes(layout_);
    EXPECT_EQ(copied, layout_.kinds[kernels::kHcaState].offset);
    for (int64_t i = 0; i < layout_.state_slot_bytes; ++i) {
      ASSERT_EQ(std::to_integer<int>(state[i]), i < copied ? 0x11 : 0) << i;
    }
    pool_->CheckConservation();
    pool_->prefixes()->Clear();
  }
}

TEST_P(PrefixSharingTest, OnlyPagesAreTakenWhereTheStateComesFromElsewhere) {
  SequenceCache first = Publish(Tokens(512), 0x11);
  SequenceCache second = *pool_->Open();
  const std::vector<int32_t> tokens = Tokens(600);
  ASSERT_TRUE(second.Adopt(pool_->prefixes()->FindPages(root(), ChainOf(tokens), tokens)).ok());
  EXPECT_EQ(second.num_tokens(), 0);
  EXPECT_EQ(second.num_shared_tokens(), 512);
  ASSERT_TRUE(second.Reserve(600).ok());
  EXPECT_EQ(second.pages(kCsaKv)[0], first.pages(kCsaKv)[0]);
  const std::byte* state = pool_->slots().address(second.slot());
  for (int64_t i = 0; i < layout_.state_slot_bytes; ++i) ASSERT_EQ(state[i], std::byte{0});
}

TEST_P(PrefixSharingTest, WhatTheIndexAloneHoldsIsThereForOthers) {
  const int64_t num_pages = 2048 / GetParam();
  { SequenceCache first = Publish(Tokens(1024), 0x11); }
  PagePool& pages = pool_->pages(kCsaKv);
  EXPECT_EQ(pages.num_free(), num_pages / 2);
  EXPECT_EQ(pages.num_available(), num_pages);
  SequenceCache second = *pool_->Open();
  EXPECT_EQ(second.Reserve(2049).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Find(Tokens(1025)).num_tokens, 1024) << "nothing is evicted in vain";
  ASSERT_TRUE(second.Reserve(2048).ok());
  EXPECT_EQ(pages.num_available(), 0);
  EXPECT_EQ(Find(Tokens(1025)).num_tokens, 0);
  pool_->CheckConservation();
}

TEST_P(PrefixSharingTest, APageInUseIsNotEvicted) {
  SequenceCache first = Publish(Tokens(1024), 0x11);
  const int32_t page = first.pages(kCsaKv)[0];
  SequenceCache second = *pool_->Open();
  ASSERT_TRUE(second.Adopt(Find(Tokens(1025))).ok());
  { SequenceCache ended = std::move(first); }
  SequenceCache third = *pool_->Open();
  EXPECT_EQ(third.Reserve(1025).code(), absl::StatusCode::kResourceExhausted);
  ASSERT_TRUE(third.Reserve(1024).ok());
  EXPECT_EQ(second.pages(kCsaKv)[0], page);
  EXPECT_EQ(std::to_integer<int>(pool_->pages(kCsaKv).address(page)[0]), 0x11);
}

TEST_P(PrefixSharingTest, WithoutAPageForTheCopyTheSequenceIsEmptyAgain) {
  if (GetParam() == 128) return;  // No hit ends inside a page.
  SequenceCache first = Publish(Tokens(128), 0x11);
  SequenceCache rest = *pool_->Open();
  ASSERT_TRUE(rest.Reserve(2048 - GetParam()).ok());
  SequenceCache second = *pool_->Open();
  EXPECT_EQ(second.Adopt(Find(Tokens(129))).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(second.capacity_tokens(), 0);
  EXPECT_EQ(second.num_tokens(), 0);
  pool_->CheckConservation();
}

TEST_P(PrefixSharingTest, EverythingComesBackInTheEnd) {
  for (int round = 0; round < 20; ++round) {
    SequenceCache first = Publish(Tokens(128 * (round % 7 + 1), round), 0x11);
    SequenceCache second = *pool_->Open();
    ASSERT_TRUE(second.Adopt(Find(Tokens(900))).ok());
    ASSERT_TRUE(second.Reserve(900).ok());
    pool_->CheckConservation();
  }
  pool_->prefixes()->Clear();
  for (int k = 0; k < kNumPagedKinds; ++k) {
    const PagePool& pages = pool_->pages(static_cast<CacheKindIndex>(k));
    EXPECT_EQ(pages.num_free(), pages.num_pages());
  }
  pool_->CheckConservation();
}

TEST_P(PrefixSharingTest, RefusesOptionsOutOfRange) {
  for (const PrefixOptions& options :
       {PrefixOptions{.num_snapshots = -1}, PrefixOptions{.num_snapshots = 1, .tails = 0},
        PrefixOptions{.num_snapshots = 1, .snapshot_interval = 100},
        PrefixOptions{.num_snapshots = 1, .snapshot_interval = 0}}) {
    EXPECT_EQ(CachePool::Create(layout_, 2048, 3, kHostMemory, options).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

INSTANTIATE_TEST_SUITE_P(PageTokens, PrefixSharingTest, testing::Values(128, 256, 512));

}  // namespace
}  // namespace isthmus::kv
