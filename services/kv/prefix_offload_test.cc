// SPDX-License-Identifier: Apache-2.0
// Copies of what is evicted are made without the index's lock: what others do meanwhile counts.
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "gtest/gtest.h"
#include "services/kv/prefix_index.h"
#include "services/kv/testing/index_bench.h"

namespace isthmus::kv {
namespace {

constexpr int64_t kPlenty = 1 << 20;

// Two conversations of one block each, in a page each; nobody runs them any more.
struct TwoTalks {
  explicit TwoTalks(const PrefixOptions& options) : bench(128, 2, options) {
    for (Running* talk : {&old, &recent}) {
      *talk = RunningOf(bench, "", TokensOf({talk == &old ? 1 : 2}));
      EXPECT_TRUE(TakePages(bench, *talk));
      Insert(bench, *talk);
      Snapshot(bench, talk->chain[0], SnapshotReason::kTail);
      talk->pages = {};
    }
    bench.index->CheckConservation();
  }

  PrefixHit Find(const Running& talk) {
    return bench.index->FindState(talk.root, talk.chain, talk.tokens, kBlock);
  }
  HostHit FindInHost(const Running& talk) {
    return bench.index->FindHost(talk.root, talk.chain, talk.tokens, 0, kBlock);
  }
  bool EvictOne() { return bench.index->EvictUntil({1, 1, 1}); }

  // Calls `act` once, at the first copy.
  void AtFirstCopy(std::function<void()> act) {
    bench.index->ObserveCopies([this, act = std::move(act)] {
      if (num_copies++ == 0) act();
    });
  }

  Bench bench;
  Running old;
  Running recent;
  int num_copies = 0;
};

TEST(PrefixOffloadTest, OthersLookUpWhileACopyIsMade) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  std::vector<std::thread> threads;
  talks.bench.index->ObserveCopies([&] {
    std::promise<int64_t> found;
    std::future<int64_t> future = found.get_future();
    threads.emplace_back([&talks, found = std::move(found)]() mutable {
      found.set_value(talks.Find(talks.recent).num_tokens);
    });
    ASSERT_EQ(future.wait_for(std::chrono::seconds(20)), std::future_status::ready)
        << "the lock is held while bytes are copied";
    EXPECT_EQ(future.get(), kBlock);
  });
  EXPECT_TRUE(talks.EvictOne());
  EXPECT_TRUE(talks.bench.index->TakeSnapshot().ok());
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(threads.size(), 1u);
  talks.bench.index->CheckConservation();
}

TEST(PrefixOffloadTest, WhatIsCopiedIsFoundAndCountedAsBefore) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  talks.AtFirstCopy([&] {
    talks.bench.index->CheckConservation();
    for (const auto& pool : talks.bench.pages) EXPECT_EQ(pool->num_available(), 2);
    EXPECT_EQ(
        talks.bench.index->FindPages(talks.old.root, talks.old.chain, talks.old.tokens).num_tokens,
        kBlock);
  });
  EXPECT_TRUE(talks.EvictOne());
  EXPECT_GE(talks.num_copies, 1);
}

TEST(PrefixOffloadTest, WhatIsOfUseMeanwhileStays) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  PrefixHit hit;
  talks.AtFirstCopy([&] { hit = talks.Find(talks.old); });
  EXPECT_TRUE(talks.EvictOne());
  EXPECT_EQ(talks.num_copies, 2) << "the recent one went instead";
  EXPECT_EQ(hit.num_tokens, kBlock);
  EXPECT_EQ(talks.Find(talks.old).num_tokens, kBlock);
  EXPECT_EQ(talks.Find(talks.recent).num_tokens, 0);
  EXPECT_EQ(talks.FindInHost(talks.recent).num_tokens, kBlock);
  EXPECT_EQ(talks.bench.index->counts().evicted_blocks, 1u);
  EXPECT_EQ(talks.bench.index->counts().offloaded_blocks, 2u);
  hit = PrefixHit();
  talks.bench.index->CheckConservation();
}

TEST(PrefixOffloadTest, WhatIsEvictedByOthersMeanwhileIsStillKept) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  talks.AtFirstCopy([&] { EXPECT_FALSE(talks.bench.index->EvictUntil({2, 2, 2})); });
  EXPECT_TRUE(talks.EvictOne());
  EXPECT_EQ(talks.bench.index->num_blocks(), 0);
  EXPECT_EQ(talks.FindInHost(talks.old).num_tokens, kBlock);
  EXPECT_EQ(talks.FindInHost(talks.recent).num_tokens, kBlock);
  for (const auto& pool : talks.bench.pages) EXPECT_EQ(pool->num_free(), 2);
  talks.bench.index->CheckConservation();
}

TEST(PrefixOffloadTest, ASnapshotThatIsFoundMeanwhileStays) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  PrefixHit hit;
  talks.AtFirstCopy([&] { hit = talks.Find(talks.old); });
  const auto taken = talks.bench.index->TakeSnapshot();
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(talks.num_copies, 2);
  EXPECT_FALSE(talks.bench.index->LacksSnapshot(talks.old.chain[0]));
  EXPECT_TRUE(talks.bench.index->LacksSnapshot(talks.recent.chain[0]));
  EXPECT_EQ(talks.bench.index->counts().evicted_snapshots, 1u);
}

// However often others come first: a call copies no more than it may, and ends.
TEST(PrefixOffloadTest, EndsAlthoughEverythingIsFoundMeanwhile) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = kPlenty});
  talks.bench.index->ObserveCopies([&] {
    ++talks.num_copies;
    talks.Find(talks.old);
    talks.Find(talks.recent);
  });
  EXPECT_TRUE(talks.EvictOne());
  EXPECT_LE(talks.num_copies, 2) << "what is in host memory is not copied again";
  EXPECT_TRUE(talks.bench.index->TakeSnapshot().ok());
  talks.bench.index->CheckConservation();
}

// A store that is too small for what it is given forgets it at once.
TEST(PrefixOffloadTest, EndsAlthoughHostMemoryForgetsEverything) {
  TwoTalks talks({.num_snapshots = 2, .host_bytes = 1});
  talks.bench.index->ObserveCopies([&] {
    ++talks.num_copies;
    talks.Find(talks.old);
    talks.Find(talks.recent);
  });
  EXPECT_TRUE(talks.bench.index->TakeSnapshot().ok());
  EXPECT_LE(talks.num_copies, 3);
  TwoTalks others({.num_snapshots = 2, .host_bytes = 1, .host_step_bytes = 1 << 16});
  others.bench.index->ObserveCopies([&] {
    ++others.num_copies;
    others.Find(others.old);
    others.Find(others.recent);
  });
  EXPECT_TRUE(others.EvictOne());
  EXPECT_GT(others.bench.index->counts().lost_blocks, 0u);
  others.bench.index->CheckConservation();
}

}  // namespace
}  // namespace isthmus::kv
