// SPDX-License-Identifier: Apache-2.0
#include "services/kv/prefix_index.h"

#include <atomic>
#include <optional>
#include <random>
#include <thread>

#include "gtest/gtest.h"
#include "services/kv/testing/index_bench.h"

namespace isthmus::kv {
namespace {

int64_t StateTokens(Bench& bench, const Running& running) {
  return bench.index
      ->FindState(running.root, running.chain, running.tokens,
                  static_cast<int64_t>(running.tokens.size()) - 1)
      .num_tokens;
}

// ---- One thing after another

TEST(PrefixIndexTest, FindsWhatWasComputedFromTheSameTokensUnderTheSameSalt) {
  Bench bench(256, 16, {.num_snapshots = 4});
  Running first = RunningOf(bench, "a", TokensOf({1, 2, 3}, 5));
  ASSERT_TRUE(TakePages(bench, first));
  Insert(bench, first);
  EXPECT_EQ(StateTokens(bench, first), 0) << "no snapshot";
  Snapshot(bench, first.chain[1], SnapshotReason::kTail);

  const Running same = RunningOf(bench, "a", TokensOf({1, 2, 3, 4}));
  const PrefixHit hit = bench.index->FindState(same.root, same.chain, same.tokens, 511);
  EXPECT_EQ(hit.num_tokens, 256);
  EXPECT_EQ(hit.num_matched_tokens, 384);
  EXPECT_EQ(hit.pages[0].size(), 1u);
  EXPECT_EQ(hit.pages[0][0].page(), first.pages[0][0].page());
  EXPECT_TRUE(hit.snapshot.is_held());

  EXPECT_EQ(StateTokens(bench, RunningOf(bench, "b", TokensOf({1, 2, 3, 4}))), 0) << "other salt";
  EXPECT_EQ(StateTokens(bench, RunningOf(bench, "a", TokensOf({1, 3, 3, 4}))), 0) << "other token";
  // A prompt of exactly these tokens needs at least one to compute.
  EXPECT_EQ(StateTokens(bench, RunningOf(bench, "a", TokensOf({1, 2}))), 0);
  EXPECT_EQ(StateTokens(bench, RunningOf(bench, "a", TokensOf({1, 2}, 1))), 256);
}

TEST(PrefixIndexTest, TheLastPageIsThatOfTheBlockThatTheHitEndsIn) {
  Bench bench(256, 16, {.num_snapshots = 4});
  Running first = RunningOf(bench, "", TokensOf({1, 2}));
  Running other = RunningOf(bench, "", TokensOf({1, 3}));
  ASSERT_TRUE(TakePages(bench, first) && TakePages(bench, other));
  Insert(bench, first);
  Insert(bench, other);
  // Block 1 alone lies in first's page; what goes on with 3 must come from the other's.
  EXPECT_EQ(bench.index->FindPages(other.root, other.chain, other.tokens).pages[0][0].page(),
            other.pages[0][0].page());
  EXPECT_EQ(bench.index->FindPages(first.root, first.chain, first.tokens).pages[0][0].page(),
            first.pages[0][0].page());
  Snapshot(bench, first.chain[0], SnapshotReason::kTail);
  const PrefixHit half = bench.index->FindState(other.root, other.chain, other.tokens, 255);
  EXPECT_EQ(half.num_tokens, 128);
  EXPECT_EQ(half.pages[0][0].page(), first.pages[0][0].page());
}

TEST(PrefixIndexTest, PagesAreFoundWholeAndWithoutSnapshots) {
  Bench bench(256, 16, {.num_snapshots = 1});
  Running first = RunningOf(bench, "", TokensOf({1, 2, 3}, 100));
  ASSERT_TRUE(TakePages(bench, first));
  Insert(bench, first);
  const PrefixHit hit = bench.index->FindPages(first.root, first.chain, first.tokens);
  EXPECT_EQ(hit.num_tokens, 256);
  EXPECT_EQ(hit.num_matched_tokens, 384);
  EXPECT_FALSE(hit.snapshot.is_held());
}

TEST(PrefixIndexTest, AHitHoldsWhatIsEvictedMeanwhile) {
  Bench bench(128, 4, {.num_snapshots = 1});
  Running first = RunningOf(bench, "", TokensOf({1, 2}, 1));
  ASSERT_TRUE(TakePages(bench, first));
  Insert(bench, first);
  Snapshot(bench, first.chain[1], SnapshotReason::kTail);
  std::optional<PrefixHit> hit = bench.index->FindState(first.root, first.chain, first.tokens, 256);
  const int32_t page = hit->pages[0][1].page();
  first = Running();
  EXPECT_FALSE(bench.index->EvictUntil({4, 4, 4})) << "two pages are held by the hit";
  EXPECT_EQ(bench.index->num_blocks(), 0);
  EXPECT_FALSE(bench.pools.pages[0]->is_free(page));
  EXPECT_EQ(bench.snapshots->num_free(), 0);
  EXPECT_EQ(bench.index->TakeSnapshot().status().code(), absl::StatusCode::kResourceExhausted);
  hit.reset();
  EXPECT_TRUE(bench.pools.pages[0]->is_free(page));
  EXPECT_EQ(bench.snapshots->num_free(), 1);
}

TEST(PrefixIndexTest, EvictsLeavesFirstAndTheLeastRecentOfEqualWorth) {
  Bench bench(128, 6, {.num_snapshots = 4});
  Running old = RunningOf(bench, "", TokensOf({1, 2, 3}));
  Running young = RunningOf(bench, "", TokensOf({1, 2, 4}));
  ASSERT_TRUE(TakePages(bench, old) && TakePages(bench, young));
  Insert(bench, old);
  Insert(bench, young);
  // The one that was inserted first is looked up again.
  (void)bench.index->FindPages(old.root, old.chain, old.tokens);
  const Running old_names = RunningOf(bench, "", old.tokens);
  const Running young_names = RunningOf(bench, "", young.tokens);
  old = Running();
  young = Running();
  const auto matched = [&](const Running& running) {
    return bench.index->FindPages(running.root, running.chain, running.tokens).num_tokens;
  };
  // Young's own copies of the first two blocks are in nobody's hands: two pages are free.
  EXPECT_TRUE(bench.index->EvictUntil({3, 3, 3}));
  EXPECT_EQ(matched(young_names), 256);
  EXPECT_EQ(matched(old_names), 384);
  EXPECT_TRUE(bench.index->EvictUntil({4, 4, 4}));
  EXPECT_EQ(matched(old_names), 256) << "the leaf, not the root";
}

TEST(PrefixIndexTest, PagesWithoutASnapshotBehindThemGoFirst) {
  Bench bench(128, 8, {.num_snapshots = 4});
  Running useful = RunningOf(bench, "", TokensOf({1, 2, 3, 4}));
  Running useless = RunningOf(bench, "", TokensOf({5, 6}));
  ASSERT_TRUE(TakePages(bench, useful) && TakePages(bench, useless));
  Insert(bench, useful);
  Snapshot(bench, useful.chain[3], SnapshotReason::kTail);
  Insert(bench, useless);
  const Running names = RunningOf(bench, "", TokensOf({1, 2, 3, 4}, 1));
  useful = Running();
  useless = Running();
  EXPECT_TRUE(bench.index->EvictUntil({4, 4, 4}));
  EXPECT_EQ(StateTokens(bench, names), 512);
}

TEST(PrefixIndexTest, SnapshotsAreEvictedApartFromPages) {
  Bench bench(128, 16, {.num_snapshots = 2, .tails = 8});
  Running one = RunningOf(bench, "", TokensOf({1, 2, 3, 4}, 1));
  Running two = RunningOf(bench, "", TokensOf({5}, 1));
  Running three = RunningOf(bench, "", TokensOf({6, 7}, 1));
  for (Running* running : {&one, &two, &three}) {
    ASSERT_TRUE(TakePages(bench, *running));
    Insert(bench, *running);
    Snapshot(bench, running->chain.back(), SnapshotReason::kTail);
  }
  // Two's saves the fewest tokens.
  EXPECT_EQ(StateTokens(bench, one), 512);
  EXPECT_EQ(StateTokens(bench, two), 0);
  EXPECT_EQ(StateTokens(bench, three), 256);
  EXPECT_EQ(bench.index->num_blocks(), 7);
  EXPECT_EQ(bench.index->counts().evicted_snapshots, 1u);
  EXPECT_EQ(bench.index->counts().evicted_blocks, 0u);
  EXPECT_TRUE(bench.index->LacksSnapshot(two.chain[0]));
}

TEST(PrefixIndexTest, AConversationKeepsItsLatestTailsAndWhatOthersNeed) {
  Bench bench(128, 16, {.num_snapshots = 16, .tails = 2});
  Running talk = RunningOf(bench, "", TokensOf({1, 2, 3, 4, 5, 6, 7}));
  ASSERT_TRUE(TakePages(bench, talk));
  Insert(bench, talk);
  const SnapshotReason reasons[] = {SnapshotReason::kTail, SnapshotReason::kBranch,
                                    SnapshotReason::kTail, SnapshotReason::kInterval,
                                    SnapshotReason::kTail, SnapshotReason::kTail,
                                    SnapshotReason::kTail};
  for (size_t block = 0; block < 7; ++block) Snapshot(bench, talk.chain[block], reasons[block]);
  const bool lacks[] = {true, false, true, false, true, false, false};
  for (size_t block = 0; block < 7; ++block) {
    EXPECT_EQ(bench.index->LacksSnapshot(talk.chain[block]), lacks[block]) << block;
  }
  // Another one goes on from block 6: its tails do not cost the first one its own.
  Running other = RunningOf(bench, "", TokensOf({1, 2, 3, 4, 5, 6, 8, 9}));
  ASSERT_TRUE(TakePages(bench, other));
  Insert(bench, other);
  Snapshot(bench, other.chain[6], SnapshotReason::kTail);
  Snapshot(bench, other.chain[7], SnapshotReason::kTail);
  EXPECT_FALSE(bench.index->LacksSnapshot(talk.chain[5]));
  EXPECT_FALSE(bench.index->LacksSnapshot(talk.chain[6]));
}

TEST(PrefixIndexTest, HasNoMoreBlocksThanItMay) {
  Bench bench(128, 16, {.num_snapshots = 1}, /*max_blocks=*/3);
  Running one = RunningOf(bench, "", TokensOf({1, 2, 3, 4, 5}));
  ASSERT_TRUE(TakePages(bench, one));
  Insert(bench, one);
  EXPECT_EQ(bench.index->num_blocks(), 3) << "a chain is not cut at its start to grow at its end";
  Running two = RunningOf(bench, "", TokensOf({6}));
  ASSERT_TRUE(TakePages(bench, two));
  Insert(bench, two);
  EXPECT_EQ(bench.index->num_blocks(), 3);
  bench.index->CheckConservation();
}

// Three threads look up while a fourth one inserts, evicts and drops: what is found is held and is
// what was asked for. ThreadSanitizer sees the rest.
void LookUpWhileOthersInsertAndEvict(const PrefixOptions& options) {
  Bench bench(128, 24, options);
  std::vector<std::vector<int32_t>> prompts;
  for (int32_t i = 0; i < 8; ++i) prompts.push_back(TokensOf({i / 4, i / 2, i, 7, 8}, 1));
  std::atomic<bool> stops = false;
  std::atomic<int64_t> num_hits = 0;
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      while (!stops) {
        const Running names = RunningOf(bench, "", prompts[random() % prompts.size()]);
        const PrefixHit hit =
            bench.index->FindState(names.root, names.chain, names.tokens, int64_t{640});
        for (const auto& pages : hit.pages) {
          EXPECT_EQ(static_cast<int64_t>(pages.size()) * kBlock, hit.num_tokens);
        }
        if (hit.num_tokens > 0) ++num_hits;
        const HostHit further = bench.index->FindHost(names.root, names.chain, names.tokens,
                                                      hit.num_tokens, int64_t{640});
        EXPECT_TRUE(further.num_tokens == 0 || further.num_tokens > hit.num_tokens);
      }
    });
  }
  std::mt19937_64 random(9);
  // A busy machine may start the threads late.
  for (int round = 0; round < 2000 || (num_hits == 0 && round < 1'000'000); ++round) {
    Running running = RunningOf(bench, "", prompts[random() % prompts.size()]);
    if (!TakePages(bench, running)) continue;
    Insert(bench, running);
    auto snapshot = bench.index->TakeSnapshot();
    if (!snapshot.ok()) continue;  // All are being looked at.
    bench.index->AddSnapshot(running.chain[random() % running.chain.size()], *std::move(snapshot),
                             SnapshotReason::kTail);
  }
  stops = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(num_hits, 0);
  bench.index->CheckConservation();
  EXPECT_EQ(bench.index->counts().offloaded_blocks > 0, options.host_bytes > 0);
}

TEST(PrefixIndexTest, ThreadsLookUpWhileOthersInsertAndEvict) {
  LookUpWhileOthersInsertAndEvict({.num_snapshots = 3});
}

TEST(PrefixIndexTest, ThreadsLookUpWhileOthersCopyToHostMemory) {
  LookUpWhileOthersInsertAndEvict({.num_snapshots = 3, .host_bytes = 1 << 17});
}

}  // namespace
}  // namespace isthmus::kv
