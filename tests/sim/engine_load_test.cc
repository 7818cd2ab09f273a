// SPDX-License-Identifier: Apache-2.0
// Figures of one engine under load, in simulated time. Each test is a failure that other engines
// have had: decode starved by prompts, a pool that never recovers, victims of a flood, livelock.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>

#include "tests/sim/loaded_engine.h"
#include "tests/sim/random_source.h"

namespace isthmus::sim {
namespace {

constexpr absl::Duration kStepTime = absl::Milliseconds(20);
constexpr absl::Duration kPromptTokenTime = absl::Microseconds(100);

LoadSizes SizesOf(int64_t cache_tokens, int32_t max_sequences) {
  LoadSizes sizes;
  sizes.script.page_tokens = 128;
  sizes.script.vocab_size = 1024;
  sizes.script.max_positions = 200'000;
  sizes.script.step_time = kStepTime;
  sizes.script.prefill_token_time = kPromptTokenTime;
  sizes.cache_tokens = cache_tokens;
  sizes.max_sequences = max_sequences;
  return sizes;
}

// One step of replies alone and one with a whole chunk beside them.
absl::Duration StepAndChunk(const LoadSizes& sizes) {
  return 2 * kStepTime + sizes.max_batch_tokens * kPromptTokenTime;
}

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

void ExpectAllFaithful(const LoadedEngine& engine) {
  for (const auto& request : engine.requests()) {
    EXPECT_EQ(request->num_ends, 1);
    EXPECT_TRUE(engine.IsFaithful(*request)) << request->kind << ": " << request->status;
  }
}

void ExpectAllFree(LoadedEngine& engine) {
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const kv::PagePool& pages = engine.pool().pages(static_cast<kernels::CacheKindIndex>(k));
    EXPECT_EQ(pages.num_free(), pages.num_pages());
  }
  EXPECT_EQ(engine.pool().slots().num_free(), engine.pool().slots().num_pages());
}

// Eight replies run while long prompts come without a pause, of all lengths up to 64K.
TEST(EngineLoadTest, ContinuousLongPromptsDoNotStarveReplies) {
  const LoadSizes sizes = SizesOf(600'000, 16);
  LoadedEngine engine(sizes);
  RandomSource random(60);
  std::vector<LoadRequest*> victims;
  for (int i = 0; i < 8; ++i) {
    victims.push_back(&engine.Ask({.num_prompt_tokens = 100, .max_output_tokens = 8000}));
  }
  engine.RunFor(absl::Seconds(5));
  const absl::Time begin = engine.now();
  engine.RunFor(absl::Minutes(5), [&] {
    if (engine.num_waiting() >= 4) return;
    engine.Ask({.num_prompt_tokens = random.Between(4000, 64'000), .max_output_tokens = 50});
  });
  std::vector<absl::Duration> gaps;
  for (const LoadRequest* victim : victims) {
    std::ranges::copy(GapsOf(*victim, begin, engine.now()), std::back_inserter(gaps));
  }
  const absl::Duration p99 = QuantileOf(gaps, 0.99);
  printf(
      "between tokens under long prompts: p50 %.1f ms, p99 %.1f ms, longest %.1f ms; a decode "
      "step and a chunk step take %.1f ms; %zu gaps, %zu prompts came\n",
      Milliseconds(QuantileOf(gaps, 0.5)), Milliseconds(p99), Milliseconds(QuantileOf(gaps, 1)),
      Milliseconds(StepAndChunk(sizes)), gaps.size(), engine.requests().size() - 8);
  EXPECT_LE(p99, 2 * StepAndChunk(sizes));
  EXPECT_GT(gaps.size(), 20'000u);
}

// A crowd of replies that get far longer than any before fills the pools; when it is over, those
// who were there before have what they had.
TEST(EngineLoadTest, ThroughputIsBackTenSecondsAfterThePoolsWereFull) {
  LoadSizes sizes = SizesOf(16'384, 24);
  LoadedEngine engine(sizes);
  RandomSource random(61);
  // Twelve clients, each of which asks again when it has its reply.
  std::vector<LoadRequest*> clients(12, nullptr);
  const auto keep_asking = [&] {
    for (LoadRequest*& client : clients) {
      if (client != nullptr && client->num_ends == 0) continue;
      client = &engine.Ask({.num_prompt_tokens = random.Between(50, 400),
                            .max_output_tokens = random.Between(20, 120),
                            .kind = "client"});
    }
  };
  engine.RunFor(absl::Minutes(2), keep_asking);
  const double before = engine.TokensPerSecond(engine.now() - absl::Minutes(1), engine.now());
  std::vector<LoadRequest*> crowd;
  for (int i = 0; i < 40; ++i) {
    crowd.push_back(&engine.Ask({.num_prompt_tokens = random.Between(50, 400),
                                 .max_output_tokens = random.Between(2000, 4000),
                                 .kind = "crowd"}));
  }
  const absl::Time full = engine.now();
  const auto crowd_is_there = [&] {
    return std::ranges::any_of(crowd, [](const LoadRequest* r) { return r->num_ends == 0; });
  };
  while (crowd_is_there()) engine.RunFor(absl::Seconds(1), keep_asking);
  const absl::Time over = engine.now();
  const int64_t num_preemptions = engine.loop().num_preemptions();
  engine.RunFor(absl::Minutes(1), keep_asking);
  const double ten_seconds = engine.TokensPerSecond(over, over + absl::Seconds(10));
  const double after = engine.TokensPerSecond(over + absl::Seconds(10), engine.now());
  printf(
      "tokens/s: %.1f before, %.1f while the pools were full (%.0f s, %lld preemptions), %.1f in "
      "the first 10 s after it, %.1f then\n",
      before, engine.TokensPerSecond(full, over), absl::ToDoubleSeconds(over - full),
      static_cast<long long>(num_preemptions), ten_seconds, after);
  EXPECT_GT(num_preemptions, 0);
  EXPECT_GE(ten_seconds, 0.95 * before);
  EXPECT_GE(after, 0.95 * before);
  engine.RunToTheEnd(absl::Minutes(1));
  ExpectAllFaithful(engine);
  ExpectAllFree(engine);
}

// Ten prompts of 64K at once; short requests come every two seconds, and others are urgent.
TEST(EngineLoadTest, AFloodOfLongPromptsDoesNotStarveShortOnes) {
  const LoadSizes sizes = SizesOf(800'000, 32);
  LoadedEngine engine(sizes);
  for (int i = 0; i < 10; ++i) {
    engine.Ask({.num_prompt_tokens = 65'536, .max_output_tokens = 20, .kind = "flood"});
  }
  std::vector<LoadRequest*> short_ones;
  std::vector<LoadRequest*> urgent_ones;
  absl::Time next = engine.now();
  engine.RunFor(absl::Seconds(60), [&] {
    if (engine.now() < next) return;
    next += absl::Seconds(2);
    short_ones.push_back(&engine.Ask({.num_prompt_tokens = 200, .max_output_tokens = 30}));
    urgent_ones.push_back(&engine.Ask(
        {.num_prompt_tokens = 2000, .max_output_tokens = 30, .priority = Priority::kHigh}));
  });
  engine.RunToTheEnd(absl::Minutes(10));
  const auto first_token_times = [](const std::vector<LoadRequest*>& requests) {
    std::vector<absl::Duration> times;
    for (const LoadRequest* r : requests) times.push_back(r->token_times.front() - r->arrived);
    return times;
  };
  const absl::Duration short_p99 = QuantileOf(first_token_times(short_ones), 0.99);
  const absl::Duration urgent_p99 = QuantileOf(first_token_times(urgent_ones), 0.99);
  printf(
      "first token beside ten prompts of 64K: 200 tokens p99 %.0f ms, 2000 urgent tokens p99 "
      "%.0f ms\n",
      Milliseconds(short_p99), Milliseconds(urgent_p99));
  // In equal shares of half a chunk a short prompt takes 200 / 21 steps; first come, first served,
  // it would wait for 640 of them. An urgent one has more than half of every chunk.
  EXPECT_LE(short_p99, 20 * StepAndChunk(sizes));
  EXPECT_LE(urgent_p99, 12 * StepAndChunk(sizes));
  ExpectAllFaithful(engine);
  ExpectAllFree(engine);
}

// Far more requests than slots, then far more than pages; everything ends and comes back.
TEST(EngineLoadTest, RecoversWhenSlotsAndPagesWereExhausted) {
  for (const bool by_slots : {true, false}) {
    LoadedEngine engine(by_slots ? SizesOf(65'536, 4) : SizesOf(1024, 64));
    RandomSource random(63);
    for (int i = 0; i < 300; ++i) {
      engine.Ask({.num_prompt_tokens = random.Between(1, 200),
                  .max_output_tokens = random.Between(1, 200)});
    }
    engine.RunToTheEnd(absl::Hours(1));
    ExpectAllFaithful(engine);
    ExpectAllFree(engine);
    LoadRequest& fresh = engine.Ask({.num_prompt_tokens = 100, .max_output_tokens = 10});
    engine.RunToTheEnd(absl::Seconds(1));
    EXPECT_TRUE(fresh.status.ok()) << fresh.status;
  }
}

// Two replies, each of which fills the pool to its last token: while one is preempted, resumed and
// recomputed its pages are charged once, or it could never come back.
TEST(EngineLoadTest, AResumedSequenceIsChargedOnce) {
  LoadedEngine engine(SizesOf(1024, 2));
  LoadRequest& first = engine.Ask({.num_prompt_tokens = 300, .max_output_tokens = 724});
  LoadRequest& second = engine.Ask({.num_prompt_tokens = 300, .max_output_tokens = 724});
  engine.RunToTheEnd(absl::Minutes(2));
  EXPECT_TRUE(first.status.ok()) << first.status;
  EXPECT_TRUE(second.status.ok()) << second.status;
  ExpectAllFaithful(engine);
}

// Long replies of the lowest class have taken everything; urgent requests come beside them.
TEST(EngineLoadTest, AnUrgentRequestDoesNotWaitForRepliesOfALowerClass) {
  LoadedEngine engine(SizesOf(4096, 8));
  for (int i = 0; i < 8; ++i) {
    engine.Ask({.num_prompt_tokens = 300, .max_output_tokens = 3000, .priority = Priority::kLow});
  }
  std::vector<LoadRequest*> urgent;
  absl::Time next = engine.now() + absl::Seconds(5);
  engine.RunFor(absl::Seconds(100), [&] {
    if (engine.now() < next) return;
    next += absl::Seconds(10);
    urgent.push_back(&engine.Ask(
        {.num_prompt_tokens = 900, .max_output_tokens = 50, .priority = Priority::kHigh}));
  });
  engine.RunToTheEnd(absl::Hours(1));
  std::vector<absl::Duration> waits;
  for (const LoadRequest* request : urgent) waits.push_back(request->admitted - request->arrived);
  const auto num_preemptions = static_cast<size_t>(engine.loop().num_preemptions());
  printf(
      "an urgent request beside long replies: longest wait %.0f ms, %zu requests, %zu "
      "preemptions\n",
      Milliseconds(QuantileOf(waits, 1)), urgent.size(), num_preemptions);
  EXPECT_LE(QuantileOf(waits, 1), StepAndChunk(SizesOf(4096, 8)));
  EXPECT_GT(num_preemptions, 0);
  ExpectAllFaithful(engine);
  ExpectAllFree(engine);
}

// Low requests under a continuous load of high ones that alone would fill the engine.
TEST(EngineLoadTest, ALowRequestIsServedUnderAContinuousLoadOfUrgentOnes) {
  LoadedEngine engine(SizesOf(4096, 8));
  RandomSource random(64);
  std::vector<LoadRequest*> low;
  absl::Time next = engine.now() + absl::Seconds(10);
  const auto num_high_waiting = [&] {
    return std::ranges::count_if(engine.requests(), [](const auto& r) {
      return r->priority == Priority::kHigh && r->admitted == absl::InfiniteFuture();
    });
  };
  engine.RunFor(absl::Minutes(12), [&] {
    while (num_high_waiting() < 4) {
      engine.Ask({.num_prompt_tokens = random.Between(50, 500),
                  .max_output_tokens = random.Between(20, 300),
                  .priority = Priority::kHigh});
    }
    if (engine.now() < next || low.size() >= 10) return;
    next += absl::Seconds(30);
    low.push_back(&engine.Ask(
        {.num_prompt_tokens = 100, .max_output_tokens = 100, .priority = Priority::kLow}));
  });
  std::vector<absl::Duration> times;
  for (const LoadRequest* request : low) {
    ASSERT_EQ(request->num_ends, 1);
    times.push_back(request->ended - request->arrived);
  }
  printf("a low request beside a full load of high ones: p50 %.0f s, longest %.0f s\n",
         absl::ToDoubleSeconds(QuantileOf(times, 0.5)),
         absl::ToDoubleSeconds(QuantileOf(times, 1)));
  // Passed only by those that arrive within five patiences (urgency.h), then a reply's time.
  EXPECT_LE(QuantileOf(times, 1), 5 * kPatience + absl::Minutes(1));
}

// Hours of mixed traffic: what it costs here and what it shows.
TEST(EngineLoadTest, HoursOfTrafficLoseNothing) {
  LoadSizes sizes = SizesOf(3200, 12);
  sizes.script.max_positions = 3000;
  sizes.script.end_probability = 0.005;
  sizes.script.max_tokens_per_step = 3;
  LoadedEngine engine(sizes);
  RandomSource random(65);
  absl::Time next = engine.now();
  engine.RunFor(absl::Hours(2), [&] {
    if (engine.now() < next) return;
    next = engine.now() + random.Between(absl::ZeroDuration(), absl::Milliseconds(2400));
    LoadRequest request;
    request.num_prompt_tokens =
        random.Chance(0.1) ? random.Between(1000, 2000) : random.Between(1, 600);
    request.max_output_tokens = random.Between(1, 600);
    request.priority = static_cast<Priority>(random.Below(3));
    if (random.Chance(0.1)) {
      request.leaves_after = random.Between(absl::ZeroDuration(), absl::Seconds(20));
    }
    engine.Ask(request);
  });
  engine.RunToTheEnd(absl::Hours(1));
  std::vector<absl::Duration> times;
  for (const auto& r : engine.requests()) {
    if (r->status.ok()) times.push_back(r->ended - r->arrived);
  }
  printf(
      "two hours: %zu requests, %lld rounds, %lld preemptions, from arrival to end p50 %.1f s, "
      "p99 %.1f s, longest %.1f s\n",
      engine.requests().size(), static_cast<long long>(engine.num_rounds()),
      static_cast<long long>(engine.loop().num_preemptions()),
      absl::ToDoubleSeconds(QuantileOf(times, 0.5)), absl::ToDoubleSeconds(QuantileOf(times, 0.99)),
      absl::ToDoubleSeconds(QuantileOf(times, 1)));
  EXPECT_GT(engine.loop().num_preemptions(), 0);
  ExpectAllFaithful(engine);
  ExpectAllFree(engine);
}

}  // namespace
}  // namespace isthmus::sim
