// SPDX-License-Identifier: Apache-2.0
// A whole sequence cache from one pool to another, as two workers do it.
#include "services/worker/page_groups.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/time/clock.h"
#include "kvtransfer/sender.h"
#include "kvtransfer/transport_loopback.h"

namespace isthmus::worker {
namespace {

using testing::HasSubstr;

constexpr int64_t kTokens = 300;  // Two pages of each kind, the second one partly filled.
const std::string kTransferId = "0123456789abcdef";

std::unique_ptr<kv::CachePool> MakePool() {
  kernels::KvGeometry geometry;
  geometry.compress_ratios = {0, 4, 128, 4};
  const auto layout = kernels::KvLayout::Create(geometry);
  EXPECT_TRUE(layout.ok()) << layout.status();
  auto pool = kv::CachePool::Create(*layout, 2048, 3);
  EXPECT_TRUE(pool.ok()) << pool.status();
  return *std::move(pool);
}

void Fill(kv::CachePool& pool, const kv::SequenceCache& cache, uint32_t seed) {
  for (const transfer::ExpectedGroup& group : GroupsOf(pool, cache, kTokens)) {
    auto* bytes = const_cast<std::byte*>(group.bytes.data());
    for (size_t i = 0; i < group.bytes.size(); ++i) {
      seed = seed * 1664525u + 1013904223u;
      bytes[i] = static_cast<std::byte>(seed >> 24);
    }
  }
}

// A prefill and a decode worker's caches, and the network between them.
struct Pair {
  Pair() {
    *prefill.Open();  // The first slot is given back, so that indices may differ.
    taken = *decode.Open();
    EXPECT_TRUE(taken.Reserve(256).ok());
    source = *prefill.Open();
    target = *decode.Open();
    EXPECT_TRUE(source.Reserve(kTokens + 1).ok());
    EXPECT_TRUE(target.Reserve(kTokens + 100).ok());
    endpoint = *owner->Publish(RegionsOf(decode), {7, decode.layout().fingerprint});
    reservation.set_transfer_id(kTransferId);
    reservation.set_worker_incarnation(7);
    reservation.set_layout_fingerprint(decode.layout().fingerprint);
    DescribePages(decode, target, kTokens, endpoint.regions(0).generation(), &reservation);
    Fill(prefill, source, 1);
  }

  v1::KvHandoff Digests() {
    v1::KvHandoff handoff;
    handoff.set_transfer_id(kTransferId);
    for (const transfer::ExpectedGroup& group : GroupsOf(prefill, source, kTokens)) {
      v1::PageGroupDigest* digest = handoff.add_digests();
      digest->set_cache_kind(group.cache_kind);
      digest->set_page_index(group.page_index);
      digest->set_num_layers(group.num_layers);
      digest->set_first_position(group.first_position);
      digest->set_crc32c(DigestOf(kTransferId, group));
    }
    return handoff;
  }
  absl::StatusOr<uint64_t> Push() {
    const auto spans = SpansOf(prefill, source, kTokens, reservation);
    if (!spans.ok()) return spans.status();
    auto pusher =
        transfer::Pusher::Open(*writer, reservation, endpoint, prefill.layout().fingerprint);
    if (!pusher.ok()) return pusher.status();
    const absl::Status status = pusher->Push(*spans, absl::Now() + absl::Seconds(5));
    if (!status.ok()) return status;
    return pusher->bytes();
  }
  absl::StatusOr<uint64_t> Verify() {
    return transfer::VerifyGroups(
        Digests(), GroupsOf(decode, target, kTokens),
        [](const transfer::ExpectedGroup& group) { return DigestOf(kTransferId, group); });
  }

  std::unique_ptr<kv::CachePool> prefill_pool = MakePool();
  std::unique_ptr<kv::CachePool> decode_pool = MakePool();
  kv::CachePool& prefill = *prefill_pool;
  kv::CachePool& decode = *decode_pool;
  kv::SequenceCache taken;
  kv::SequenceCache source;
  kv::SequenceCache target;
  transfer::LoopbackNetwork network;
  std::unique_ptr<transfer::Transport> owner = transfer::MakeLoopbackTransport(&network, "decode");
  std::unique_ptr<transfer::Transport> writer =
      transfer::MakeLoopbackTransport(&network, "prefill");
  v1::TransferEndpoint endpoint;
  v1::KvReservation reservation;
};

TEST(PageGroupsTest, AWholeCacheArrivesAndVerifies) {
  Pair pair;
  EXPECT_NE(pair.source.slot(), pair.target.slot());
  const auto bytes = pair.Push();
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  const auto verified = pair.Verify();
  ASSERT_TRUE(verified.ok()) << verified.status();
  // Two pages of three paged kinds, and the four kinds of the state slot.
  EXPECT_EQ(*verified, 10);
  std::set<uint32_t> kinds;
  for (const auto& group : GroupsOf(pair.decode, pair.target, kTokens)) {
    kinds.insert(group.cache_kind);
  }
  EXPECT_EQ(kinds.size(), kernels::kNumCacheKinds);
}

TEST(PageGroupsTest, OneLostSpanIsFoundWhicheverItIs) {
  Pair whole;
  ASSERT_TRUE(whole.Push().ok());
  const size_t num_spans = SpansOf(whole.prefill, whole.source, kTokens, whole.reservation)->size();
  EXPECT_EQ(num_spans, 7);
  for (size_t lost = 0; lost < num_spans; ++lost) {
    Pair pair;
    size_t index = 0;
    pair.network.before_post = [&](const transfer::LoopbackWrite&) {
      transfer::LoopbackFate fate;
      if (index++ == lost) fate.error = absl::UnavailableError("lost");
      return fate;
    };
    EXPECT_FALSE(pair.Push().ok());
    EXPECT_EQ(pair.Verify().status().code(), absl::StatusCode::kDataLoss) << "span " << lost;
  }
}

TEST(PageGroupsTest, IntactBytesOfAnotherTransferDoNotVerify) {
  Pair pair;
  ASSERT_TRUE(pair.Push().ok());
  const auto verified = transfer::VerifyGroups(
      pair.Digests(), GroupsOf(pair.decode, pair.target, kTokens),
      [](const transfer::ExpectedGroup& group) { return DigestOf("fedcba9876543210", group); });
  EXPECT_EQ(verified.status().code(), absl::StatusCode::kDataLoss);
}

TEST(PageGroupsTest, AReservationForAnotherLengthIsRefused) {
  Pair pair;
  pair.reservation.mutable_pages(1)->mutable_pages()->RemoveLast();
  EXPECT_THAT(std::string(pair.Push().status().message()),
              HasSubstr("cache kind 1 has 1 pages, 300 tokens of which 0 are held need 2"));
  *pair.reservation.add_pages() = pair.reservation.pages(0);
  EXPECT_THAT(std::string(pair.Push().status().message()), HasSubstr("listed twice"));
}

}  // namespace
}  // namespace isthmus::worker
