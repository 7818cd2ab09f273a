// SPDX-License-Identifier: Apache-2.0
#include "services/engine/prefix_reuse.h"

#include <algorithm>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "services/base/clock.h"
#include "services/engine/engine.h"
#include "services/engine/preemption.h"
#include "services/model/scripted_forward.h"

namespace isthmus::engine {
namespace {

// A scripted model verifies every byte that it could read of pages and states, so a wrong page, a
// stale snapshot or another tenant's entry is an error of the step.
class Served {
 public:
  Served(int32_t page_tokens, int64_t cache_tokens, const kv::PrefixOptions& prefixes,
         const EngineOptions& engine_options = {.chunk_tokens = 96}, int32_t drafts = 1) {
    options.vocab_size = 64;
    options.page_tokens = page_tokens;
    options.max_tokens_per_step = drafts;
    forward = *model::ScriptedForward::Create(options, clock);
    pool = *kv::CachePool::Create(forward->layout(), cache_tokens, 6, kv::kHostMemory, prefixes);
    engine = std::make_unique<Engine>(forward.get(), pool.get(), engine_options, kernels::Exec{});
  }

  Sequence Run(const std::vector<int32_t>& prompt, int64_t max_tokens,
               const std::string& salt = "") {
    SamplingParams sampling;
    sampling.max_tokens = max_tokens;
    auto admitted = engine->Admit("r", prompt, sampling, salt);
    EXPECT_TRUE(admitted.ok()) << admitted.status();
    Sequence sequence = *std::move(admitted);
    Sequence* const one = &sequence;
    while (!sequence.is_finished()) {
      const absl::Status status = engine->Step({&one, 1});
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
    }
    pool->CheckConservation();
    const std::vector<int32_t> reply(sequence.tokens.begin() + sequence.num_prompt_tokens,
                                     sequence.tokens.end());
    EXPECT_EQ(reply, model::ScriptedReply(options, prompt, max_tokens));
    return sequence;
  }

  SimulatedClock clock;
  model::ScriptedOptions options;
  std::unique_ptr<model::ScriptedForward> forward;
  std::unique_ptr<kv::CachePool> pool;
  std::unique_ptr<Engine> engine;
};

std::vector<int32_t> PromptOf(int64_t size, int32_t seed = 0) {
  std::mt19937 random(static_cast<uint32_t>(seed));
  std::vector<int32_t> prompt;
  for (int64_t i = 0; i < size; ++i) prompt.push_back(static_cast<int32_t>(random() % 60 + 2));
  return prompt;
}

std::vector<int32_t> Joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr kv::PrefixOptions kPrefixes = {.num_snapshots = 16};

TEST(PrefixReuseTest, TheSamePromptIsComputedOnce) {
  for (const int32_t page_tokens : {128, 256, 512}) {
    for (const int64_t size : {1, 127, 128, 129, 255, 256, 257, 300, 511, 512, 513, 700}) {
      Served served(page_tokens, 8192, kPrefixes);
      EXPECT_EQ(served.Run(PromptOf(size), 3).num_reused_tokens, 0);
      // At least one token is computed, and all before the last boundary are not.
      EXPECT_EQ(served.Run(PromptOf(size), 3).num_reused_tokens, (size - 1) / 128 * 128) << size;
      EXPECT_EQ(served.Run(PromptOf(size), 3).num_reused_tokens, (size - 1) / 128 * 128) << size;
    }
  }
}

// The long sessions of others had no cached tokens at all while short ones had many.
TEST(PrefixReuseTest, CachedTokensGrowWithATranscript) {
  for (const int32_t page_tokens : {128, 256}) {
    Served served(page_tokens, 16384, kPrefixes, {.chunk_tokens = 96}, 4);
    std::vector<int32_t> transcript = PromptOf(200);
    int64_t before = -1;
    for (int32_t turn = 1; turn <= 12; ++turn) {
      const Sequence sequence = served.Run(transcript, 150);
      // Everything up to the last whole block of the turn before, its reply included.
      EXPECT_GT(sequence.num_reused_tokens, before) << turn;
      if (turn > 1) {
        EXPECT_GE(sequence.num_reused_tokens, sequence.num_prompt_tokens - 40 - 128);
      }
      before = sequence.num_reused_tokens;
      transcript = Joined(sequence.tokens, PromptOf(40, turn));
    }
  }
}

TEST(PrefixReuseTest, TheSecondPromptBehindASystemPromptMakesItsEndReusable) {
  Served served(256, 8192, kPrefixes);
  const std::vector<int32_t> system = PromptOf(400);
  EXPECT_EQ(served.Run(Joined(system, PromptOf(500, 1)), 2).num_reused_tokens, 0);
  EXPECT_EQ(served.Run(Joined(system, PromptOf(500, 2)), 2).num_reused_tokens, 0);
  EXPECT_EQ(served.Run(Joined(system, PromptOf(500, 3)), 2).num_reused_tokens, 384);
  EXPECT_EQ(served.Run(Joined(system, PromptOf(20, 4)), 2).num_reused_tokens, 384);
}

TEST(PrefixReuseTest, ALongPromptHasSnapshotsOnItsWay) {
  Served served(256, 8192, {.num_snapshots = 16, .snapshot_interval = 256});
  const std::vector<int32_t> prompt = PromptOf(1000);
  served.Run(prompt, 1);
  const std::vector<int32_t> other =
      Joined({prompt.begin(), prompt.begin() + 700}, PromptOf(100, 1));
  EXPECT_EQ(served.Run(other, 1).num_reused_tokens, 512);
}

TEST(PrefixReuseTest, TenantsWithOtherSaltsShareNothing) {
  Served served(128, 8192, kPrefixes);
  const std::vector<int32_t> prompt = PromptOf(600);
  served.Run(prompt, 2, "one");
  EXPECT_EQ(served.Run(prompt, 2, "two").num_reused_tokens, 0);
  EXPECT_EQ(served.Run(prompt, 2).num_reused_tokens, 0);
  EXPECT_EQ(served.Run(prompt, 2, "one").num_reused_tokens, 512);
  EXPECT_EQ(served.Run(prompt, 2, "two").num_reused_tokens, 512);
}

TEST(PrefixReuseTest, WhoseLogProbabilitiesAreWantedIsComputed) {
  Served served(128, 8192, kPrefixes);
  const std::vector<int32_t> prompt = PromptOf(300);
  served.Run(prompt, 2);
  SamplingParams sampling;
  sampling.top_prompt_logprobs = 0;
  EXPECT_EQ(served.engine->Admit("r", prompt, sampling)->num_reused_tokens, 0);
}

TEST(PrefixReuseTest, WithoutSnapshotsThereIsNoPrefixCache) {
  Served served(128, 8192, {});
  EXPECT_EQ(served.pool->prefixes(), nullptr);
  served.Run(PromptOf(300), 2);
  const Sequence again = served.Run(PromptOf(300), 2);
  EXPECT_EQ(again.num_reused_tokens, 0);
  EXPECT_EQ(again.wanted_boundary, 0);
  EXPECT_EQ(served.pool->pages(kernels::kCsaKv).num_free(), 64 - 3);
}

// A hit needs one page more for a moment than a cold run: it must not wait for it for ever.
TEST(PrefixReuseTest, APromptThatFillsThePoolRunsAfterItself) {
  Served served(512, 1024, kPrefixes);
  for (int round = 0; round < 3; ++round) served.Run(PromptOf(1000), 2);
  Served small(512, 512, kPrefixes);
  for (int round = 0; round < 3; ++round) small.Run(PromptOf(500), 2);
}

TEST(PrefixReuseTest, CountsWhatWasAskedAndFoundInTokens) {
  Served served(128, 1024, kPrefixes);
  served.Run(PromptOf(300), 2);
  served.Run(PromptOf(300), 2);
  const kv::PrefixCounts counts = served.pool->prefixes()->counts();
  EXPECT_EQ(counts.queried_tokens, 600u);
  EXPECT_EQ(counts.hit_tokens, 256u);
  served.Run(PromptOf(1000, 1), 2);
  EXPECT_GT(served.pool->prefixes()->counts().evicted_blocks, 0u);
}

TEST(PrefixReuseTest, PagesAreSharedBehindATransferWithoutASnapshot) {
  Served served(128, 8192, {.num_snapshots = 1});
  const Sequence first = served.Run(PromptOf(400), 2);
  Sequence second;
  second.tokens = first.tokens;
  second.num_prompt_tokens = 400;
  kv::PrefixHit found = FindPages(*served.pool, second);
  EXPECT_EQ(found.num_tokens, 384);
  const absl::Status opened = OpenWithPages(*served.pool, 500, std::move(found), second);
  ASSERT_TRUE(opened.ok()) << opened;
  EXPECT_EQ(second.cache.num_shared_tokens(), 384);
  EXPECT_EQ(second.cache.num_tokens(), 0);
  EXPECT_EQ(second.cache.capacity_tokens(), 512);
  EXPECT_EQ(second.cache.pages(kernels::kCsaKv)[2], first.cache.pages(kernels::kCsaKv)[2]);
  second.cache_salt = "other";
  second.prefix = PrefixTrace();
  EXPECT_EQ(FindPages(*served.pool, second).num_tokens, 0);
}

// What a preempted reply computed before is found again, most of it.
TEST(PrefixReuseTest, APreemptedReplyGoesOnFromItsOwnPrefix) {
  Served served(256, 4096, kPrefixes, {.chunk_tokens = 64}, 4);
  SamplingParams sampling;
  sampling.max_tokens = 400;
  Sequence sequence = *served.engine->Admit("r", PromptOf(300), sampling);
  Sequence* const one = &sequence;
  for (int step = 1; !sequence.is_finished(); ++step) {
    ASSERT_TRUE(served.engine->Step({&one, 1}).ok());
    if (step % 40 != 0 || sequence.num_output_tokens() == 0) continue;
    Preempt(sequence);
    ASSERT_TRUE(Resume(*served.engine, sequence).ok());
    EXPECT_EQ(sequence.cache.num_tokens(),
              (static_cast<int64_t>(sequence.tokens.size()) - 1) / 128 * 128);
  }
  const std::vector<int32_t> reply(sequence.tokens.begin() + 300, sequence.tokens.end());
  EXPECT_EQ(reply, model::ScriptedReply(served.options, PromptOf(300), 400));
  EXPECT_EQ(sequence.num_reused_tokens, 0) << "its prompt was computed";
}

// Crowds of prompts that have beginnings in common, under few salts, in pools that are too small
// for them: every reply is as if nobody else were there.
class Crowd {
 public:
  explicit Crowd(uint64_t seed)
      : random_(seed),
        page_tokens_(int32_t{128} << Below(3)),
        served_(page_tokens_, page_tokens_ * (2048 / page_tokens_ + Below(4)),
                {.num_snapshots = int32_t(Below(8)),
                 .snapshot_interval = 128 * (1 + Below(6)),
                 .tails = int32_t(Below(3) + 1)},
                {.chunk_tokens = 16 + Below(200), .max_batch_tokens = 64 + Below(300)},
                int32_t(Below(4) + 1)) {}

  void Play() {
    for (int step = 0; step < 250; ++step) {
      if (Below(5) == 0) Start();
      if (running_.empty()) continue;
      std::vector<Sequence*> all;
      for (auto& sequence : running_) all.push_back(sequence.get());
      const absl::Status status = served_.engine->Step(all);
      served_.pool->CheckConservation();
      if (absl::IsResourceExhausted(status)) {
        running_.erase(running_.begin() + Below(static_cast<int64_t>(running_.size())));
        continue;
      }
      ASSERT_TRUE(status.ok()) << status;
      std::erase_if(running_, [this](const auto& sequence) { return Check(*sequence); });
    }
  }

  int64_t num_reused() const { return num_reused_; }
  int64_t num_ended() const { return num_ended_; }

 private:
  int64_t Below(int64_t limit) {
    return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit));
  }

  void Start() {
    if (running_.size() >= 5) return;
    std::vector<int32_t> prompt;
    if (!past_.empty() && Below(3) == 0) prompt = past_[static_cast<size_t>(Below(past_.size()))];
    while (prompt.empty() || Below(3) > 0) {
      const int64_t size = prompt.empty() ? 200 : 1 + Below(150);
      prompt = Joined(std::move(prompt), PromptOf(size, static_cast<int32_t>(Below(3))));
    }
    if (prompt.size() > 1200) prompt.resize(1200);
    SamplingParams sampling;
    sampling.max_tokens = 1 + Below(200);
    auto admitted = served_.engine->Admit("r", prompt, sampling, Below(3) == 0 ? "other" : "one");
    if (absl::IsResourceExhausted(admitted.status())) return;
    ASSERT_TRUE(admitted.ok()) << admitted.status();
    num_reused_ += admitted->num_reused_tokens;
    running_.push_back(std::make_unique<Sequence>(*std::move(admitted)));
  }

  bool Check(const Sequence& sequence) {
    if (!sequence.is_finished()) return false;
    const auto start = sequence.tokens.begin();
    const std::vector<int32_t> prompt(start, start + sequence.num_prompt_tokens);
    const std::vector<int32_t> reply(start + sequence.num_prompt_tokens, sequence.tokens.end());
    EXPECT_EQ(reply, model::ScriptedReply(served_.options, prompt, sequence.sampling.max_tokens));
    past_.push_back(sequence.tokens);
    ++num_ended_;
    return true;
  }

  std::mt19937_64 random_;
  const int32_t page_tokens_;
  Served served_;
  std::vector<std::unique_ptr<Sequence>> running_;
  std::vector<std::vector<int32_t>> past_;
  int64_t num_reused_ = 0;
  int64_t num_ended_ = 0;
};

TEST(PrefixReuseTest, CrowdsGetTheRepliesOfColdRuns) {
  int64_t num_reused = 0;
  int64_t num_ended = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Crowd crowd(seed);
    crowd.Play();
    if (HasFailure()) return;
    num_reused += crowd.num_reused();
    num_ended += crowd.num_ended();
  }
  EXPECT_GT(num_ended, 500);
  EXPECT_GT(num_reused, 10'000) << "hits are what is tested";
}

}  // namespace
}  // namespace isthmus::engine
