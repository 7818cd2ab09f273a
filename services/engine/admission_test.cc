// SPDX-License-Identifier: Apache-2.0
#include "services/engine/admission.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <map>
#include <random>

namespace isthmus::engine {
namespace {

using ::testing::HasSubstr;

kernels::KvLayout LayoutOf() {
  kernels::KvGeometry geometry;
  geometry.compress_ratios = {4, 128};
  geometry.page_tokens = 128;
  return *kernels::KvLayout::Create(geometry);
}

// A pool of `num_pages` pages of 128 tokens of each kind.
struct Room {
  explicit Room(int64_t num_pages, int32_t num_slots = 100, const AdmissionOptions& options = {})
      : pool(*kv::CachePool::Create(LayoutOf(), num_pages * 128, num_slots)),
        admission(pool.get(), options, clock) {}

  // A sequence with its claim and its pages.
  struct Running {
    kv::SequenceCache cache;
    Admission::Claim claim;
    Demand demand;
  };
  absl::StatusOr<Running> Admit(const Demand& demand) {
    absl::StatusOr<Admission::Claim> claim = admission.Admit(demand);
    if (!claim.ok()) return claim.status();
    Running running{*pool->Open(), *std::move(claim), demand};
    EXPECT_TRUE(running.cache.Reserve(demand.num_prompt_tokens + 1).ok());
    return running;
  }

  SimulatedClock clock;
  std::unique_ptr<kv::CachePool> pool;
  Admission admission;
};

TEST(OutputLengthsTest, ExpectsAShareOfTheLongestBeforeAnyReplyHasEnded) {
  const OutputLengths lengths;
  const AdmissionOptions options = {.first_output_share = 0.25};
  EXPECT_EQ(lengths.Expect(0, 1000, options), 250);
  EXPECT_EQ(lengths.Expect(400, 1000, options), 401);
  EXPECT_EQ(lengths.Expect(1, 1, options), 1);
}

TEST(OutputLengthsTest, ExpectsAQuantileOfThoseThatWereLonger) {
  OutputLengths lengths;
  for (int64_t length = 1; length <= 101; ++length) lengths.Add(length);
  const AdmissionOptions options = {.expected_output_quantile = 0.9};
  EXPECT_EQ(lengths.Expect(0, 1000, options), 91);
  EXPECT_EQ(lengths.Expect(51, 1000, options), 52 + 45);
  EXPECT_EQ(lengths.Expect(0, 50, options), 50);
  EXPECT_EQ(lengths.Expect(200, 1000, options), 400);
}

TEST(OutputLengthsTest, KeepsTheLastOnesAlone) {
  for (uint32_t seed = 1; seed <= 20; ++seed) {
    std::mt19937 random(seed);
    OutputLengths lengths;
    std::deque<int64_t> last;
    for (int i = 0; i < 1000; ++i) {
      last.push_back(static_cast<int64_t>(1 + random() % 50));
      lengths.Add(last.back());
      if (last.size() > OutputLengths::kMaxLengths) last.pop_front();
      const auto so_far = static_cast<int64_t>(random() % 60);
      std::vector<int64_t> longer;
      std::ranges::copy_if(last, std::back_inserter(longer),
                           [&](int64_t length) { return length > so_far; });
      std::ranges::sort(longer);
      const double quantile = static_cast<double>(random() % 101) / 100;
      int64_t expected = 2 * so_far;
      if (!longer.empty()) {
        const double at = std::ceil(quantile * static_cast<double>(longer.size() - 1));
        expected = longer[static_cast<size_t>(at)];
      }
      expected = std::min<int64_t>(std::max(expected, so_far + 1), 55);
      EXPECT_EQ(lengths.Expect(so_far, 55, {.expected_output_quantile = quantile}), expected)
          << seed;
    }
  }
}

TEST(AdmissionTest, CountsWhatRunsWillStillGrowBy) {
  Room room(10, 100, {.first_output_share = 1.0});
  // Holds one page, will have four.
  auto first = room.Admit({100, 400});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(room.Admit({100, 600}).ok());  // Six: just fits, and is gone again.
  const absl::Status refused = room.Admit({100, 700}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("7 pages are expected to be wanted, 9 of 10 are "
                                           "available, of which 1 other sequences will want 3"));
  first->claim.SetTokens(512, 400);  // It has grown, so the pool would have fewer free ones.
  EXPECT_TRUE(room.Admit({100, 700}).ok());
}

TEST(AdmissionTest, ExpectsWhatRecentRepliesHad) {
  Room room(10, 100, {.expected_output_quantile = 1.0, .first_output_share = 1.0});
  EXPECT_FALSE(room.Admit({100, 100'000}).ok());
  {
    auto ended = room.Admit({100, 50});
    ended->claim.NoteEnd(50);
  }
  EXPECT_TRUE(room.Admit({100, 100'000}).ok());
}

TEST(AdmissionTest, WhoWasPreemptedGoesFirstUnlessTheOtherIsMoreUrgent) {
  Room room(10);
  auto preempted = room.Admit({100, 100});
  preempted->cache = kv::SequenceCache();
  preempted->claim.SetPreempted();
  const absl::Status refused = room.Admit({100, 100}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("preempted"));
  EXPECT_TRUE(room.Admit({100, 100, {.priority = Priority::kHigh}}).ok());
  EXPECT_TRUE(preempted->claim.CheckResume().ok());
  preempted->claim.SetTokens(128, 1);
  EXPECT_TRUE(room.Admit({100, 100}).ok());
}

TEST(AdmissionTest, OfTwoEqualsThatWerePreemptedEitherMayBeResumed) {
  Room room(10);
  auto a = room.Admit({100, 100});
  auto b = room.Admit({100, 100});
  for (auto* running : {&*a, &*b}) {
    running->cache = kv::SequenceCache();
    running->claim.SetPreempted();
  }
  EXPECT_TRUE(a->claim.CheckResume().ok());
  EXPECT_TRUE(b->claim.CheckResume().ok());
}

TEST(AdmissionTest, NamesTheStateSlotsWhenTheyAreTaken) {
  Room room(10, 1);
  auto first = room.Admit({100, 1});
  ASSERT_TRUE(first.ok());
  EXPECT_THAT(room.Admit({100, 1}).status().message(),
              HasSubstr("state slots: 1 are wanted, 0 of 1 are available"));
}

TEST(AdmissionTest, CountsTheRepliesToOnePromptFromTheStart) {
  Room room(10, 4, {.first_output_share = 1.0});
  // Each reply has two pages of its own behind the two that the prompt fills.
  EXPECT_FALSE(
      room.Admit({.num_prompt_tokens = 300, .max_output_tokens = 200, .num_replies = 5}).ok());
  auto first = room.Admit({.num_prompt_tokens = 300, .max_output_tokens = 200, .num_replies = 3});
  ASSERT_TRUE(first.ok()) << first.status();
  // Of ten pages three are held, five will be wanted; of four slots one is held, two will be.
  EXPECT_FALSE(room.Admit({100, 200}).ok());
  EXPECT_TRUE(room.Admit({100, 100}).ok());
  EXPECT_FALSE(room.Admit({.num_prompt_tokens = 1, .max_output_tokens = 1, .num_replies = 2}).ok());
  const Admission::Claim second = first->claim.Fork();
  const Admission::Claim third = first->claim.Fork();
  // A fork counts as if it held the pages of the prompt and its first token, and grows by one.
  EXPECT_TRUE(room.Admit({100, 400}).ok());
  EXPECT_FALSE(room.Admit({100, 500}).ok());
}

// Random claims against a list and the formula.
TEST(AdmissionTest, AgreesWithTheFormulaWhateverHappens) {
  int num_admitted = 0;
  int num_refused = 0;
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    const AdmissionOptions options = {0.7, 0.4};
    Room room(40, 12, options);
    std::map<int, Room::Running> all;
    std::map<int, int64_t> outputs;
    std::map<int, bool> preempted;
    OutputLengths lengths;
    const auto pages = [](int64_t tokens) { return (tokens + 127) / 128; };
    const auto final_pages = [&](const Demand& demand, int64_t output) {
      return pages(demand.num_prompt_tokens +
                   lengths.Expect(output, demand.max_output_tokens, options));
    };
    for (int step = 0; step < 300; ++step) {
      const int pick = all.empty() ? 0 : std::next(all.begin(), random() % all.size())->first;
      if (all.empty() || random() % 3 == 0) {
        Demand demand{static_cast<int64_t>(1 + random() % 600),
                      static_cast<int64_t>(1 + random() % 600)};
        demand.urgency.priority = static_cast<Priority>(random() % 3);
        int64_t wanted = final_pages(demand, 0);
        int64_t available = 40;
        int64_t num_slots = 12;
        bool must_wait =
            std::ranges::count(preempted, true, &std::pair<const int, bool>::second) >= 36;
        for (const auto& [id, running] : all) {
          if (preempted[id]) {
            must_wait = must_wait || !GoesBefore(demand.urgency, running.demand.urgency);
            continue;
          }
          const int64_t held = pages(running.cache.capacity_tokens());
          available -= held;
          --num_slots;
          wanted += std::max<int64_t>(0, final_pages(running.demand, outputs[id]) - held);
        }
        auto admitted = room.Admit(demand);
        EXPECT_EQ(admitted.ok(), !must_wait && wanted <= available && num_slots > 0)
            << seed << ": " << admitted.status();
        admitted.ok() ? ++num_admitted : ++num_refused;
        if (admitted.ok()) all.emplace(step, *std::move(admitted));
      } else if (random() % 4 == 0) {
        if (!preempted[pick]) {
          all.at(pick).claim.NoteEnd(outputs[pick]);
          lengths.Add(outputs[pick]);
        }
        all.erase(pick);
        preempted.erase(pick);
        outputs.erase(pick);
      } else if (preempted[pick] || random() % 6 == 0) {
        if (preempted[pick]) continue;
        preempted[pick] = true;
        all.at(pick).cache = kv::SequenceCache();
        all.at(pick).claim.SetPreempted();
      } else {
        Room::Running& running = all.at(pick);
        const int64_t grown = std::min<int64_t>(
            outputs[pick] + static_cast<int64_t>(random() % 100), running.demand.max_output_tokens);
        if (!running.cache.Reserve(running.demand.num_prompt_tokens + grown).ok()) continue;
        outputs[pick] = grown;
        running.claim.SetTokens(running.cache.capacity_tokens(), grown);
      }
    }
  }
  EXPECT_GT(num_admitted, 1000);
  EXPECT_GT(num_refused, 1000);
}

}  // namespace
}  // namespace isthmus::engine
