// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/simulated_world.h"

#include <gtest/gtest.h>

#include <set>

#include "services/base/queue.h"
#include "services/base/thread.h"

namespace isthmus::sim {
namespace {

WorldOptions Seed(uint64_t seed) {
  WorldOptions options;
  options.seed = seed;
  return options;
}

// Two threads that count in turns through two locks each; the order in which they came.
std::string OrderOf(uint64_t seed, uint64_t* hash) {
  SimulatedWorld world(Seed(seed));
  std::string order;
  world.Run([&] {
    Mutex mutex;
    const auto body = [&](char name) {
      for (int i = 0; i < 20; ++i) {
        {
          MutexLock lock(mutex);
          order += name;
        }
        world.Sleep(absl::Milliseconds(1));
      }
    };
    Thread a(world, [&] { body('a'); });
    Thread b(world, [&] { body('b'); });
  });
  *hash = world.trace_hash();
  return order;
}

TEST(SimulatedWorldTest, TheSameSeedGivesTheSameOrderAndAnotherSeedAnother) {
  std::set<std::string> orders;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    uint64_t first_hash = 0;
    uint64_t second_hash = 0;
    const std::string first = OrderOf(seed, &first_hash);
    EXPECT_EQ(first, OrderOf(seed, &second_hash));
    EXPECT_EQ(first_hash, second_hash);
    orders.insert(first);
  }
  EXPECT_EQ(orders.size(), 20);
}

TEST(SimulatedWorldTest, TimePassesOnlyWhenNobodyCanGoOn) {
  SimulatedWorld world(Seed(3));
  world.Run([&] {
    const absl::Time start = world.Now();
    Thread sleeper(world, [&] { world.Sleep(absl::Hours(5)); });
    EXPECT_EQ(world.Now(), start);
    sleeper.Join();
    EXPECT_GE(world.Now() - start, absl::Hours(5));
    EXPECT_LT(world.Now() - start, absl::Hours(5) + absl::Seconds(1));
  });
}

TEST(SimulatedWorldTest, AWaitEndsAtItsTimeoutAndWithItsCondition) {
  SimulatedWorld world(Seed(4));
  world.Run([&] {
    BoundedQueue<int> queue(4, world);
    const absl::Time start = world.Now();
    EXPECT_FALSE(queue.PopFor(absl::Seconds(2)).has_value());
    EXPECT_GE(world.Now() - start, absl::Seconds(2));
    Thread pusher(world, [&] {
      world.Sleep(absl::Seconds(1));
      queue.TryPush(7);
    });
    EXPECT_EQ(queue.PopFor(absl::Minutes(10)).value_or(0), 7);
    EXPECT_LT(world.Now() - start, absl::Seconds(4));
  });
}

TEST(SimulatedWorldTest, ChecksEveryStep) {
  SimulatedWorld world(Seed(5));
  int64_t checks = 0;
  world.CheckEachStep([&] { ++checks; });
  world.Run([&] {
    for (int i = 0; i < 10; ++i) world.Sleep(absl::Seconds(1));
  });
  EXPECT_EQ(checks, world.num_steps());
  EXPECT_GE(checks, 10);
}

// Reading and writing under two locks in a row loses an update in some order, and the seeds find
// it.
TEST(SimulatedWorldTest, FindsAnUpdateThatIsLostBetweenTwoLocks) {
  int lost = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    SimulatedWorld world(Seed(seed));
    int value = 0;
    world.Run([&] {
      Mutex mutex;
      const auto body = [&] {
        int seen = 0;
        {
          MutexLock lock(mutex);
          seen = value;
        }
        {
          MutexLock lock(mutex);
          value = seen + 1;
        }
      };
      Thread a(world, body);
      Thread b(world, body);
    });
    lost += value == 1 ? 1 : 0;
  }
  EXPECT_GT(lost, 0);
  EXPECT_LT(lost, 200);
}

TEST(SimulatedWorldDeathTest, ADeadlockEndsTheProcessWithAReport) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        SimulatedWorld world(Seed(9));
        world.Run([&] {
          Mutex mutex;
          CondVar changed;
          MutexLock lock(mutex);
          world.WaitFor(changed, lock, absl::InfiniteDuration(), [] { return false; });
        });
      },
      "deadlock: no thread can ever go on\nseed 9, .*thread 0");
}

TEST(SimulatedWorldDeathTest, RunningForEverEndsTheProcessWithAReport) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        WorldOptions options = Seed(9);
        options.max_steps = 1000;
        SimulatedWorld world(options);
        world.Run([&] {
          while (true) world.Sleep(absl::Milliseconds(1));
        });
      },
      "threads run for ever");
}

}  // namespace
}  // namespace isthmus::sim
