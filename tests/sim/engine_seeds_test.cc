// SPDX-License-Identifier: Apache-2.0
// One engine in a thousand seeds of arrivals, lengths, priorities, deadlines, clients that leave,
// and pools that are too small, in simulated time: every request ends exactly once with the
// script's tokens, no page is lost or owned twice, nobody starves, nothing stands still.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/sim/loaded_engine.h"
#include "tests/sim/random_source.h"

namespace isthmus::sim {
namespace {

constexpr uint64_t kBlock = 100;

// Seeds first to first + kBlock - 1.
class EngineSeedsTest : public testing::TestWithParam<uint64_t> {};

std::string NameOf(const testing::TestParamInfo<uint64_t>& seeds) {
  return absl::StrCat("Seeds", seeds.param, "To", seeds.param + kBlock - 1);
}

LoadSizes DrawSizes(RandomSource& random) {
  LoadSizes sizes;
  sizes.script.seed = random.Bits();
  sizes.script.page_tokens = random.Chance(0.8) ? 128 : 256;
  sizes.script.vocab_size = 200;
  sizes.script.end_probability = random.Chance(0.5) ? 0.01 : 0.0;
  sizes.script.max_tokens_per_step = static_cast<int32_t>(random.Between(1, 4));
  sizes.script.step_time = random.Between(absl::Milliseconds(1), absl::Milliseconds(50));
  sizes.script.prefill_token_time = random.Between(absl::ZeroDuration(), absl::Microseconds(300));
  sizes.cache_tokens = 256 * random.Between(2, 8);
  sizes.max_sequences = static_cast<int32_t>(random.Between(1, 8));
  sizes.chunk_tokens = random.Between(1, 300);
  sizes.max_batch_tokens = random.Between(1, 600);
  sizes.admission.expected_output_quantile = random.Chance(0.3)   ? 0.0
                                             : random.Chance(0.5) ? 0.5
                                                                  : 1;
  sizes.admission.first_output_share = random.Chance(0.5) ? 0.0 : random.Chance(0.5) ? 0.3 : 1;
  return sizes;
}

LoadRequest DrawRequest(RandomSource& random, const LoadSizes& sizes) {
  LoadRequest request;
  const int64_t longest = std::min<int64_t>(sizes.cache_tokens, 700);
  request.max_output_tokens = random.Between(1, longest / 2);
  request.num_prompt_tokens = random.Between(1, longest - request.max_output_tokens);
  request.priority = static_cast<Priority>(random.Below(3));
  if (random.Chance(0.3)) {
    request.deadline = random.Between(absl::ZeroDuration(), absl::Minutes(2));
  }
  if (random.Chance(0.2)) {
    request.leaves_after = random.Between(absl::ZeroDuration(), absl::Seconds(20));
  }
  return request;
}

// All that the requests could take if they ran one after another, token by token.
absl::Duration OneByOne(const LoadedEngine& engine, const LoadSizes& sizes) {
  const int64_t most = std::min(sizes.chunk_tokens, sizes.max_batch_tokens);
  absl::Duration sum;
  for (const auto& r : engine.requests()) {
    const int64_t num_steps = r->num_prompt_tokens / most + 1 + r->max_output_tokens;
    sum +=
        num_steps * sizes.script.step_time + r->num_prompt_tokens * sizes.script.prefill_token_time;
  }
  return sum;
}

TEST_P(EngineSeedsTest, EveryRequestEndsOnceAndNobodyStarves) {
  int64_t num_preemptions = 0;
  int64_t num_preempting_seeds = 0;
  int64_t num_replies = 0;
  int64_t num_left = 0;
  double slowest = 0;
  for (uint64_t seed = GetParam(); seed < GetParam() + kBlock; ++seed) {
    RandomSource random(seed * 0x2545f4914f6cdd1d + 9);
    const LoadSizes sizes = DrawSizes(random);
    LoadedEngine engine(sizes);
    const int64_t num_requests = random.Between(2, 20);
    const absl::Duration rush = random.Between(absl::ZeroDuration(), absl::Seconds(10));
    absl::Time next = engine.now();
    int64_t num_asked = 0;
    engine.RunFor(rush + absl::Seconds(1), [&] {
      while (num_asked < num_requests && engine.now() >= next) {
        engine.Ask(DrawRequest(random, sizes));
        next += random.Between(absl::ZeroDuration(), 2 * rush / num_requests);
        ++num_asked;
      }
    });
    // What is recomputed comes on top, by sequences that are behind others that go on.
    const absl::Duration bound = 3 * OneByOne(engine, sizes) + absl::Seconds(10);
    engine.RunFor(bound);
    ASSERT_EQ(engine.num_open(), 0) << "seed " << seed << ": not within " << bound;
    for (const auto& r : engine.requests()) {
      EXPECT_EQ(r->num_ends, 1) << "seed " << seed;
      EXPECT_TRUE(engine.IsFaithful(*r)) << "seed " << seed << ": " << r->status;
      const bool may_leave = r->leaves_after < absl::InfiniteDuration();
      EXPECT_TRUE(r->status.ok() || (may_leave && absl::IsCancelled(r->status)))
          << "seed " << seed << ": " << r->status;
      ++(r->status.ok() ? num_replies : num_left);
      slowest = std::max(slowest, absl::FDivDuration(r->ended - r->arrived, bound));
    }
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const kv::PagePool& pages = engine.pool().pages(static_cast<kernels::CacheKindIndex>(k));
      EXPECT_EQ(pages.num_free(), pages.num_pages()) << "seed " << seed;
    }
    EXPECT_EQ(engine.pool().slots().num_free(), sizes.max_sequences) << "seed " << seed;
    num_preemptions += engine.loop().num_preemptions();
    num_preempting_seeds += engine.loop().num_preemptions() > 0 ? 1 : 0;
  }
  printf(
      "%lld replies, %lld clients left, %lld preemptions in %lld seeds; the slowest request took "
      "%.2f of its bound\n",
      static_cast<long long>(num_replies), static_cast<long long>(num_left),
      static_cast<long long>(num_preemptions), static_cast<long long>(num_preempting_seeds),
      slowest);
  EXPECT_GT(num_preempting_seeds, 5);
}

INSTANTIATE_TEST_SUITE_P(Blocks, EngineSeedsTest, testing::Range<uint64_t>(1, 1001, kBlock),
                         NameOf);

}  // namespace
}  // namespace isthmus::sim
