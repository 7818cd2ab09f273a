// SPDX-License-Identifier: Apache-2.0
// The prefix index against one that knows only lists.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "services/kv/prefix_index.h"
#include "services/kv/testing/index_bench.h"

namespace isthmus::kv {
namespace {

// The same rules over a plain list: whole prefixes are compared, leaves and victims are looked for.
class NaiveIndex {
 public:
  struct Entry {
    std::string salt;
    std::vector<int32_t> prefix;
    std::array<int32_t, kNumPagedKinds> pages{};
    int32_t snapshot = -1;
    SnapshotReason reason = SnapshotReason::kTail;
    int64_t snapshot_tokens = 0;
    double page_clock = 0;
    double snapshot_clock = 0;
    uint64_t last_use = 0;
    uint64_t snapshot_use = 0;
  };

  NaiveIndex(const Bench& bench, const PrefixOptions& options)
      : bench_(&bench), tails_(options.tails) {
    for (const PagePool* pool : bench.pools.pages) {
      block_bytes_ += static_cast<double>(pool->page_bytes()) /
                      static_cast<double>(bench.layout.geometry.page_tokens / kBlock);
    }
    snapshot_bytes_ = static_cast<double>(bench.snapshots->page_bytes());
  }

  Entry* Find(const std::string& salt, const std::vector<int32_t>& tokens, size_t num_blocks) {
    const std::vector<int32_t> prefix(tokens.begin(),
                                      tokens.begin() + static_cast<int64_t>(num_blocks) * kBlock);
    for (Entry& entry : entries_) {
      if (entry.salt == salt && entry.prefix == prefix) return &entry;
    }
    return nullptr;
  }

  // The entries of the longest known prefix, at most `most` blocks.
  std::vector<Entry*> Path(const std::string& salt, const std::vector<int32_t>& tokens,
                           size_t most) {
    std::vector<Entry*> path;
    while (path.size() < std::min(most, tokens.size() / kBlock)) {
      Entry* entry = Find(salt, tokens, path.size() + 1);
      if (entry == nullptr) break;
      path.push_back(entry);
    }
    if (path.empty()) return path;
    ++num_uses_;
    for (Entry* entry : path) {
      entry->page_clock = page_clock_;
      entry->last_use = num_uses_;
    }
    return path;
  }

  void UseSnapshot(Entry& entry) const {
    entry.snapshot_clock = snapshot_clock_;
    entry.snapshot_use = num_uses_;
  }

  void Insert(const std::string& salt, const Running& running,
              const PrefixIndex::PageLists& pages) {
    const size_t page_blocks = static_cast<size_t>(bench_->layout.geometry.page_tokens / kBlock);
    for (size_t block = 0; block < running.chain.size(); ++block) {
      if (Find(salt, running.tokens, block + 1) != nullptr) continue;
      Entry entry;
      entry.salt = salt;
      entry.prefix.assign(running.tokens.begin(),
                          running.tokens.begin() + static_cast<int64_t>(block + 1) * kBlock);
      for (size_t k = 0; k < pages.size(); ++k) entry.pages[k] = pages[k][block / page_blocks];
      entry.page_clock = page_clock_;
      entry.last_use = ++num_uses_;
      entries_.push_back(entry);
    }
  }

  void AddSnapshot(const std::string& salt, const std::vector<int32_t>& tokens, size_t num_blocks,
                   int32_t snapshot, SnapshotReason reason) {
    Entry* entry = Find(salt, tokens, num_blocks);
    if (entry == nullptr || entry->snapshot >= 0) return;
    size_t before = num_blocks - 1;
    while (before > 0 && Find(salt, tokens, before)->snapshot < 0) --before;
    entry->snapshot = snapshot;
    entry->reason = reason;
    entry->snapshot_tokens = static_cast<int64_t>(num_blocks - before) * kBlock;
    entry->snapshot_clock = snapshot_clock_;
    entry->snapshot_use = ++num_uses_;
    int32_t num_tails = 0;
    for (size_t up = num_blocks; up > 0; --up) {
      Entry* above = Find(salt, tokens, up);
      if (up != num_blocks && NumChildren(*above) > 1) return;
      if (above->snapshot < 0 || above->reason != SnapshotReason::kTail) continue;
      if (++num_tails > tails_) above->snapshot = -1;
    }
  }

  // `held`: pages of each kind that somebody else holds.
  using Held = std::array<std::set<int32_t>, kNumPagedKinds>;

  bool EvictLeaf(const Held& held) {
    Entry* victim = nullptr;
    for (const bool wants_idle : {true, false}) {
      for (Entry& entry : entries_) {
        if (NumChildren(entry) > 0 || (wants_idle && !IsIdle(entry, held))) continue;
        if (victim == nullptr || LeafWorth(entry) < LeafWorth(*victim)) victim = &entry;
      }
      if (victim != nullptr) break;
    }
    if (victim == nullptr) return false;
    page_clock_ = std::max(page_clock_, LeafWorth(*victim).first);
    entries_.erase(entries_.begin() + (victim - entries_.data()));
    return true;
  }

  void EvictUntil(const std::array<int64_t, kNumPagedKinds>& num_free, const Held& held) {
    for (size_t k = 0; k < held.size(); ++k) {
      while (NumFree(k, held) < num_free[k] && EvictLeaf(held)) continue;
    }
  }

  int64_t NumFree(size_t kind, const Held& held) const {
    std::set<int32_t> taken = held[kind];
    for (const Entry& entry : entries_) taken.insert(entry.pages[kind]);
    return bench_->pools.pages[kind]->num_pages() - static_cast<int64_t>(taken.size());
  }

  void EvictSnapshot() {
    Entry* victim = nullptr;
    for (Entry& entry : entries_) {
      if (entry.snapshot < 0) continue;
      if (victim == nullptr || SnapshotWorth(entry) < SnapshotWorth(*victim)) victim = &entry;
    }
    if (victim == nullptr) return;
    snapshot_clock_ = std::max(snapshot_clock_, SnapshotWorth(*victim).first);
    victim->snapshot = -1;
  }

  const std::vector<Entry>& entries() const { return entries_; }

 private:
  int64_t NumChildren(const Entry& parent) const {
    return std::ranges::count_if(entries_, [&](const Entry& entry) {
      return entry.salt == parent.salt && entry.prefix.size() == parent.prefix.size() + kBlock &&
             std::equal(parent.prefix.begin(), parent.prefix.end(), entry.prefix.begin());
    });
  }
  static bool IsIdle(const Entry& entry, const Held& held) {
    for (size_t k = 0; k < held.size(); ++k) {
      if (held[k].count(entry.pages[k]) == 0) return true;
    }
    return false;
  }
  std::pair<double, uint64_t> LeafWorth(const Entry& entry) const {
    const double tokens = entry.snapshot < 0 ? 0.125 * kBlock : double(entry.snapshot_tokens);
    const double bytes =
        entry.snapshot < 0 ? block_bytes_ : block_bytes_ * tokens / kBlock + snapshot_bytes_;
    return {entry.page_clock + tokens * (1 << 20) / bytes, entry.last_use};
  }
  std::pair<double, uint64_t> SnapshotWorth(const Entry& entry) const {
    return {entry.snapshot_clock + double(entry.snapshot_tokens) * (1 << 20) / snapshot_bytes_,
            entry.snapshot_use};
  }

  const Bench* bench_;
  const int32_t tails_;
  double block_bytes_ = 0;
  double snapshot_bytes_ = 0;
  std::vector<Entry> entries_;
  double page_clock_ = 0;
  double snapshot_clock_ = 0;
  uint64_t num_uses_ = 0;
};

// Some hundred steps of sequences that come, look up, go on, are published and end.
class ModelRun {
 public:
  explicit ModelRun(uint64_t seed)
      : random_(seed),
        // Copies to host memory change nothing in the order in which pages give way.
        options_{.num_snapshots = int32_t(Below(6) + 1),
                 .tails = int32_t(Below(3) + 1),
                 .host_bytes = seed % 2 == 0 ? int64_t{1} << 18 : 0},
        bench_(Below(2) == 0 ? 128 : 256, int32_t(Below(24) + 4), options_),
        naive_(bench_, options_) {}

  void Play(int num_steps) {
    for (int step = 0; step < num_steps; ++step) {
      switch (Below(8)) {
        case 0:
        case 1:
        case 2:
          Start();
          break;
        case 3:
          if (!running_.empty()) LookUpPages(running_[Below(running_.size())].running);
          break;
        case 4:
        case 5:
          if (!running_.empty()) Publish(running_[Below(running_.size())]);
          break;
        default:
          if (!running_.empty()) {
            running_.erase(running_.begin() + static_cast<int64_t>(Below(running_.size())));
          }
      }
      Compare();
      if (testing::Test::HasFatalFailure()) return;
    }
    running_.clear();
    EXPECT_TRUE(bench_.index->EvictUntil(AllPages())) << "everything idle can be evicted";
  }

  uint64_t num_hits() const { return num_hits_; }
  uint64_t num_evicted() const { return bench_.index->counts().evicted_blocks; }
  uint64_t num_evicted_snapshots() const { return bench_.index->counts().evicted_snapshots; }

 private:
  struct Member {
    Running running;
    std::string salt;
  };

  size_t Below(size_t limit) { return random_() % limit; }

  std::array<int64_t, kNumPagedKinds> AllPages() const {
    std::array<int64_t, kNumPagedKinds> all{};
    for (size_t k = 0; k < all.size(); ++k) all[k] = bench_.pools.pages[k]->num_pages();
    return all;
  }

  void Start() {
    Member member;
    member.salt = Below(4) == 0 ? "other" : "";
    std::vector<int32_t> blocks;
    const size_t num_blocks = Below(6);
    for (size_t block = 0; block < num_blocks; ++block) {
      blocks.push_back(static_cast<int32_t>(Below(block == 0 ? 2 : 3)));
    }
    member.running =
        RunningOf(bench_, member.salt, TokensOf(blocks, static_cast<int64_t>(Below(kBlock))));
    LookUpState(member);
    if (TakeRest(member.running)) running_.push_back(std::move(member));
  }

  // Pages for the rest, evicted on both sides.
  bool TakeRest(Running& running) {
    NaiveIndex::Held held;
    for (size_t k = 0; k < held.size(); ++k) {
      for (const HeldPage& page : running.pages[k]) held[k].insert(page.page());
      for (const Member& member : running_) {
        for (const HeldPage& page : member.running.pages[k]) held[k].insert(page.page());
      }
      const PagePool& pool = *bench_.pools.pages[k];
      EXPECT_EQ(pool.num_free(), naive_.NumFree(k, held));
      EXPECT_EQ(pool.num_available(), pool.num_pages() - static_cast<int64_t>(held[k].size()));
    }
    const int64_t page_tokens = bench_.layout.geometry.page_tokens;
    const auto wanted =
        (static_cast<int64_t>(running.tokens.size()) + page_tokens - 1) / page_tokens;
    const int64_t missing = wanted - static_cast<int64_t>(running.pages[0].size());
    if (bench_.pools.pages[0]->num_available() < missing) return false;
    naive_.EvictUntil({missing, missing, missing}, held);
    return TakePages(bench_, running);
  }

  void LookUpState(Member& member) {
    Running& running = member.running;
    const auto most = running.tokens.empty() ? 0 : (running.tokens.size() - 1) / kBlock;
    std::vector<NaiveIndex::Entry*> path = naive_.Path(member.salt, running.tokens, most);
    const size_t matched = path.size();
    while (!path.empty() && path.back()->snapshot < 0) path.pop_back();
    if (!path.empty()) naive_.UseSnapshot(*path.back());
    PrefixHit hit = bench_.index->FindState(running.root, running.chain, running.tokens,
                                            static_cast<int64_t>(running.tokens.size()) - 1);
    ASSERT_EQ(hit.num_tokens, static_cast<int64_t>(path.size()) * kBlock);
    ASSERT_EQ(hit.num_matched_tokens, static_cast<int64_t>(matched) * kBlock);
    ASSERT_EQ(hit.snapshot.is_held(), !path.empty());
    if (path.empty()) return;
    ++num_hits_;
    ASSERT_EQ(hit.snapshot.page(), path.back()->snapshot);
    ComparePages(hit, path);
    // Full pages are shared from now on.
    const size_t full =
        path.size() / static_cast<size_t>(bench_.layout.geometry.page_tokens / kBlock);
    for (size_t k = 0; k < hit.pages.size(); ++k) {
      hit.pages[k].resize(full);
      running.pages[k] = std::move(hit.pages[k]);
    }
  }

  void LookUpPages(const Running& running) {
    const std::string salt = running.root == bench_.index->RootOf("") ? "" : "other";
    const std::vector<NaiveIndex::Entry*> path = naive_.Path(salt, running.tokens, SIZE_MAX);
    const PrefixHit hit = bench_.index->FindPages(running.root, running.chain, running.tokens);
    const auto blocks = static_cast<size_t>(bench_.layout.geometry.page_tokens / kBlock);
    ASSERT_EQ(hit.num_tokens, static_cast<int64_t>(path.size() / blocks * blocks) * kBlock);
    ASSERT_FALSE(hit.snapshot.is_held());
    ComparePages(hit, {path.begin(), path.begin() + hit.num_tokens / kBlock});
  }

  void ComparePages(const PrefixHit& hit, const std::vector<NaiveIndex::Entry*>& path) const {
    const auto blocks = static_cast<size_t>(bench_.layout.geometry.page_tokens / kBlock);
    for (size_t k = 0; k < hit.pages.size(); ++k) {
      ASSERT_EQ(hit.pages[k].size(), (path.size() + blocks - 1) / blocks);
      for (size_t page = 0; page < hit.pages[k].size(); ++page) {
        const size_t last = std::min((page + 1) * blocks, path.size()) - 1;
        ASSERT_EQ(hit.pages[k][page].page(), path[last]->pages[k]);
      }
    }
  }

  void Publish(Member& member) {
    Running& running = member.running;
    naive_.Insert(member.salt, running, running.Lists());
    Insert(bench_, running);
    if (running.chain.empty() || Below(3) == 0) return;
    const size_t num_blocks = Below(running.chain.size()) + 1;
    const auto reason = static_cast<SnapshotReason>(Below(3));
    if (bench_.snapshots->num_free() == 0) naive_.EvictSnapshot();
    auto snapshot = bench_.index->TakeSnapshot();
    ASSERT_TRUE(snapshot.ok()) << snapshot.status();
    naive_.AddSnapshot(member.salt, running.tokens, num_blocks, snapshot->page(), reason);
    bench_.index->AddSnapshot(running.chain[num_blocks - 1], *std::move(snapshot), reason);
  }

  void Compare() {
    bench_.index->CheckConservation();
    ASSERT_EQ(bench_.index->num_blocks(), static_cast<int64_t>(naive_.entries().size()));
    std::vector<int32_t> snapshots;
    for (const NaiveIndex::Entry& entry : naive_.entries()) {
      const Running names = RunningOf(bench_, entry.salt, entry.prefix);
      ASSERT_EQ(bench_.index->LacksSnapshot(names.chain.back()), entry.snapshot < 0);
      if (entry.snapshot >= 0) snapshots.push_back(entry.snapshot);
    }
    std::ranges::sort(snapshots);
    ASSERT_EQ(std::ranges::adjacent_find(snapshots), snapshots.end());
    ASSERT_EQ(bench_.snapshots->num_free(),
              bench_.snapshots->num_pages() - static_cast<int32_t>(snapshots.size()));
  }

  std::mt19937_64 random_;
  const PrefixOptions options_;
  Bench bench_;
  NaiveIndex naive_;
  std::vector<Member> running_;
  uint64_t num_hits_ = 0;
};

TEST(PrefixIndexTest, DoesWhatANaiveOneDoes) {
  uint64_t num_hits = 0;
  uint64_t num_evicted = 0;
  uint64_t num_evicted_snapshots = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    ModelRun run(seed);
    run.Play(150);
    if (HasFatalFailure()) return;
    num_hits += run.num_hits();
    num_evicted += run.num_evicted();
    num_evicted_snapshots += run.num_evicted_snapshots();
  }
  // What was never met was not tested.
  EXPECT_GT(num_hits, 1000u);
  EXPECT_GT(num_evicted, 1000u);
  EXPECT_GT(num_evicted_snapshots, 1000u);
}

}  // namespace
}  // namespace isthmus::kv
