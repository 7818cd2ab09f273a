// SPDX-License-Identifier: Apache-2.0
// Newcomers without room that ask running sequences of lower classes to give way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "services/base/fault.h"
#include "services/engine/admission.h"

namespace isthmus::engine {
namespace {

using ::testing::HasSubstr;

kernels::KvLayout LayoutOf() {
  kernels::KvGeometry geometry;
  geometry.compress_ratios = {4, 128};
  geometry.page_tokens = 128;
  return *kernels::KvLayout::Create(geometry);
}

// A pool of so many pages of 128 tokens of each kind, and who has them. A reply is expected to have
// one token.
struct Room {
  explicit Room(int64_t num_pages, int32_t num_slots = 100)
      : pool(*kv::CachePool::Create(LayoutOf(), num_pages * 128, num_slots)),
        admission(pool.get(), {.first_output_share = 0}, clock) {}

  // A sequence with its claim and its pages.
  struct Running {
    kv::SequenceCache cache;
    Admission::Claim claim;
    int64_t num_tokens = 0;
    int64_t num_output_tokens = 0;
  };
  Demand DemandOf(int64_t num_prompt_tokens, Priority priority, uint64_t ask_id = 0) {
    return {.num_prompt_tokens = num_prompt_tokens,
            .max_output_tokens = 100,
            .urgency = {.priority = priority, .arrived = clock.Now()},
            .ask_id = ask_id};
  }
  absl::StatusOr<Running> Reserve(const Demand& demand) {
    absl::StatusOr<Admission::Claim> claim = admission.Admit(demand);
    if (!claim.ok()) return claim.status();
    Running running{*pool->Open(), *std::move(claim), demand.num_prompt_tokens};
    EXPECT_TRUE(running.cache.Reserve(demand.num_prompt_tokens + 1).ok());
    return running;
  }
  Running Run(const Demand& demand) {
    Running running = *Reserve(demand);
    Step(running);
    return running;
  }
  static void Step(Running& running) {
    ++running.num_output_tokens;
    running.claim.SetTokens(running.cache.capacity_tokens(), running.num_output_tokens);
  }
  static void Preempt(Running& running) {
    running.cache = kv::SequenceCache();
    running.claim.SetPreempted();
  }
  void Resume(Running& running) {
    ASSERT_TRUE(running.claim.CheckResume().ok()) << running.claim.CheckResume();
    running.cache = *pool->Open();
    ASSERT_TRUE(running.cache.Reserve(running.num_tokens + 1).ok());
    running.claim.SetTokens(running.cache.capacity_tokens(), running.num_output_tokens);
  }
  bool HasOpenAsk() const { return admission.OpenAsk().has_value(); }
  // Whether Admit refuses with such an answer.
  bool IsRefused(const Demand& demand, bool has_room_soon) {
    const absl::Status status = admission.Admit(demand).status();
    return absl::IsResourceExhausted(status) && HasRoomSoon(status) == has_room_soon;
  }

  SimulatedClock clock;
  std::unique_ptr<kv::CachePool> pool;
  Admission admission;
};

// One of the lowest class has three of four pages.
struct Asking : Room {
  Asking() : Room(4), low(Run(DemandOf(300, Priority::kLow))) {}
  Demand Urgent(uint64_t ask_id = 7) { return DemandOf(200, Priority::kHigh, ask_id); }
  // The ask is served.
  void Serve(uint64_t ask_id = 7) {
    Preempt(low);
    EXPECT_TRUE(admission.CloseAsk(ask_id, 1));
  }

  Running low;
};

TEST(AskTest, OnlyAMoreUrgentNewcomerOfAHigherClassLeavesOne) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(0), false));
  EXPECT_TRUE(room.IsRefused(room.DemandOf(600, Priority::kHigh, 1), false));  // More than all.
  EXPECT_TRUE(room.IsRefused(room.DemandOf(200, Priority::kLow, 2), false));
  EXPECT_TRUE(room.admission.Admit(room.DemandOf(100, Priority::kHigh, 3)).ok());
  EXPECT_FALSE(room.HasOpenAsk());
  room.clock.Sleep(5 * kPatience);  // Who runs has waited longer than a class is worth.
  EXPECT_TRUE(room.IsRefused(room.Urgent(), false));
  EXPECT_FALSE(room.HasOpenAsk());
}

TEST(AskTest, KeepsTheRoomForWhomOthersGaveWay) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
  ASSERT_TRUE(room.HasOpenAsk());
  EXPECT_EQ(room.admission.OpenAsk()->ask_id, 7u);
  EXPECT_FALSE(room.admission.HasRoomForAsk(7, {}));
  const Admission::Claim* const claim = &room.low.claim;
  EXPECT_TRUE(claim->GivesWayTo(room.admission.OpenAsk()->urgency));
  EXPECT_TRUE(room.admission.HasRoomForAsk(7, {&claim, 1}));
  room.Serve();
  EXPECT_FALSE(room.HasOpenAsk());
  // Neither who was preempted nor who goes behind it; who goes before it does.
  EXPECT_THAT(room.low.claim.CheckResume().message(), HasSubstr("more urgent"));
  EXPECT_TRUE(room.IsRefused(room.DemandOf(10, Priority::kNormal), false));
  Demand sooner = room.DemandOf(10, Priority::kHigh);
  sooner.urgency.deadline = room.clock.Now() + absl::Seconds(1);
  EXPECT_TRUE(room.Reserve(sooner).ok());
  room.clock.Sleep(kAskTime / 2);
  absl::StatusOr<Room::Running> urgent = room.Reserve(room.Urgent());
  ASSERT_TRUE(urgent.ok()) << urgent.status();
  EXPECT_THAT(room.low.claim.CheckResume().message(), HasSubstr("pages"));
  urgent = absl::CancelledError("ended");
  room.Resume(room.low);
}

TEST(AskTest, IsOverAfterItsTimeAndTheNextOfItsClassWaits) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
  room.Serve();
  room.clock.Sleep(kAskTime - absl::Milliseconds(1));
  EXPECT_FALSE(room.low.claim.CheckResume().ok());
  room.clock.Sleep(absl::Milliseconds(1));
  room.Resume(room.low);
  Room::Step(room.low);
  EXPECT_TRUE(room.IsRefused(room.Urgent(8), false));
  room.clock.Sleep(kAskPause);
  EXPECT_TRUE(room.IsRefused(room.Urgent(8), true));
}

TEST(AskTest, InVainDoesNotKeepAHigherClassFromAsking) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.DemandOf(200, Priority::kNormal, 6), true));
  room.Serve(6);
  room.clock.Sleep(kAskTime);  // Its client has left.
  room.Resume(room.low);
  Room::Step(room.low);
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
}

// As when those that run cannot be preempted.
TEST(AskTest, ThatPreemptedNobodyKeepsNothingAndNobodyOff) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
  EXPECT_FALSE(room.admission.CloseAsk(7, 0));
  EXPECT_TRUE(room.admission.Admit(room.DemandOf(10, Priority::kLow)).ok());
  EXPECT_TRUE(room.IsRefused(room.Urgent(8), true));
}

// What it lacks is held by others as well: it would preempt them for nothing again.
TEST(AskTest, InVainIsNotRepeated) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
  kv::SequenceCache shared = std::move(room.low.cache);
  Room::Preempt(room.low);
  EXPECT_FALSE(room.admission.CloseAsk(7, 1));
  room.low.claim.SetTokens(384, ++room.low.num_output_tokens);
  room.clock.Sleep(absl::Minutes(1));
  EXPECT_TRUE(room.IsRefused(room.Urgent(), false));
  EXPECT_TRUE(room.IsRefused(room.Urgent(8), true));
}

// The loop looks at an ask in several steps, and the asker may come between them.
TEST(AskTest, ThatWasAdmittedMeanwhilePreemptsNobodyElse) {
  Asking room;
  EXPECT_TRUE(room.IsRefused(room.Urgent(), true));
  Room::Preempt(room.low);
  const absl::StatusOr<Room::Running> urgent = room.Reserve(room.Urgent());
  ASSERT_TRUE(urgent.ok());
  EXPECT_TRUE(room.admission.HasRoomForAsk(7, {}));
  EXPECT_TRUE(room.admission.CloseAsk(7, 1));
  EXPECT_FALSE(room.low.claim.CheckResume().ok());
}

// What the request's own prefix holds is idle once the refused call has let go of it. It is not
// room for the request, which will hold it again.
TEST(AskTest, DoesNotCountTheNewcomersOwnPrefixAsRoom) {
  Room room(10);
  Room::Running low = room.Run(room.DemandOf(700, Priority::kLow));  // Six of ten pages.
  Demand urgent = room.DemandOf(800, Priority::kHigh, 7);
  urgent.num_shared_tokens = 384;
  {
    // Three idle pages are held during the call. One page is free; four are wanted.
    kv::SequenceCache hit = *room.pool->Open();
    ASSERT_TRUE(hit.Reserve(384).ok());
    EXPECT_TRUE(room.IsRefused(urgent, true));
  }
  EXPECT_FALSE(room.admission.HasRoomForAsk(7, {}));
  const Admission::Claim* const claim = &low.claim;
  EXPECT_TRUE(room.admission.HasRoomForAsk(7, {&claim, 1}));
}

// Whoever comes and goes: who gave way gains a token before it does so again.
TEST(AskTest, AsksNobodyWhoHasGainedNothingSinceTheLastTime) {
  Asking room;
  for (uint64_t id = 1; id <= 5; ++id) {
    EXPECT_TRUE(room.IsRefused(room.Urgent(id), true));
    room.Serve(id);
    EXPECT_TRUE(room.Reserve(room.Urgent(id)).ok());  // And gives it back.
    room.Resume(room.low);
    EXPECT_TRUE(room.IsRefused(room.Urgent(100 + id), false));
    Room::Step(room.low);
  }
}

// Their prompts are on their way: they have nothing yet that could be recomputed.
TEST(AskTest, AsksNobodyWhoDoesNotRunYet) {
  Room room(4);
  absl::StatusOr<Room::Running> low = room.Reserve(room.DemandOf(300, Priority::kLow));
  ASSERT_TRUE(low.ok());
  EXPECT_TRUE(room.IsRefused(room.DemandOf(200, Priority::kHigh, 7), false));
  Room::Step(*low);
  EXPECT_TRUE(room.IsRefused(room.DemandOf(200, Priority::kHigh, 7), true));
}

TEST(AskTest, WhoseRoomWentToAMoreUrgentOneAsksAgain) {
  Room room(4);
  std::vector<Room::Running> low;
  for (int i = 0; i < 4; ++i) low.push_back(room.Run(room.DemandOf(100, Priority::kLow)));
  Demand first = room.DemandOf(100, Priority::kHigh, 1);
  Demand sooner = room.DemandOf(100, Priority::kHigh);
  sooner.urgency.deadline = room.clock.Now() + absl::Seconds(20);
  EXPECT_TRUE(room.IsRefused(first, true));
  Room::Preempt(low[0]);
  EXPECT_TRUE(room.admission.CloseAsk(1, 1));
  const absl::StatusOr<Room::Running> taken = room.Reserve(sooner);
  ASSERT_TRUE(taken.ok());
  EXPECT_TRUE(room.IsRefused(first, true));
  EXPECT_TRUE(room.HasOpenAsk());
}

// The pages that forks share come back once, not once for each of them.
TEST(AskTest, CountsThePagesThatForksShareOnce) {
  for (const int64_t num_prompt_tokens : {800, 760}) {
    Room room(10);
    Demand demand = room.DemandOf(384, Priority::kLow);
    demand.num_replies = 3;
    absl::StatusOr<Room::Running> low = room.Reserve(demand);
    ASSERT_TRUE(low.ok()) << low.status();
    ASSERT_TRUE(low->cache.SetNumTokens(384).ok());
    std::vector<Room::Running> forks;
    for (int i = 0; i < 2; ++i) {
      forks.push_back({*room.pool->Open(), low->claim.Fork()});
      ASSERT_TRUE(forks.back().cache.Reserve(1).ok());
      ASSERT_TRUE(low->cache.ForkInto(forks.back().cache).ok());
      forks.back().claim.SetTokens(385, 1);
    }
    Room::Step(*low);
    // Six pages. Somebody of the high class has the other four.
    const Room::Running high = room.Run(room.DemandOf(500, Priority::kHigh));
    // Seven: more than all three forks have together; or six.
    EXPECT_TRUE(room.IsRefused(room.DemandOf(num_prompt_tokens, Priority::kHigh, 7),
                               num_prompt_tokens == 760));
  }
}

TEST(AskTest, IsAdmittedThoughAsManyAsThereAreSlotsGaveWay) {
  Room room(4, 1);
  Room::Running low = room.Run(room.DemandOf(100, Priority::kLow));
  EXPECT_TRUE(room.IsRefused(room.DemandOf(100, Priority::kNormal, 7), true));
  Room::Preempt(low);
  EXPECT_TRUE(room.admission.CloseAsk(7, 1));
  EXPECT_TRUE(room.admission.Admit(room.DemandOf(100, Priority::kNormal, 7)).ok());
}

// Of whoever is behind it, so many wait that they are as many as there are slots.
TEST(AskTest, AnUrgentRequestIsNotKeptOutOfFreeRoomByWhatIsPreempted) {
  Room room(8, 2);
  std::vector<Room::Running> low;
  for (int i = 0; i < 2; ++i) low.push_back(room.Run(room.DemandOf(100, Priority::kLow)));
  for (Room::Running& running : low) Room::Preempt(running);
  EXPECT_TRUE(room.admission.Admit(room.DemandOf(100, Priority::kHigh)).ok());
}

}  // namespace
}  // namespace isthmus::engine
