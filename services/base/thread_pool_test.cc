// SPDX-License-Identifier: Apache-2.0
// The pool under load. Bodies write to cells of their own or to atomics, so that ThreadSanitizer
// sees the pool's own ordering and nothing else.
#include "services/base/thread_pool.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "services/base/mutex.h"

namespace isthmus {
namespace {

// Loops of the endurance test; the sanitizers make a barrier some twenty times slower.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kManyLoops = 5000;
#else
constexpr int kManyLoops = 100000;
#endif

TEST(ThreadPoolTest, RunsEveryItemOnce) {
  for (const int threads : {1, 2, 3, 5}) {
    ThreadPool pool(threads);
    for (const int64_t count : {1, 2, 7, 64, 1000}) {
      for (const int64_t grain : {1, 3, 64, 5000}) {
        std::vector<int> runs(count, 0);
        pool.ParallelFor(count, grain, [&](int64_t begin, int64_t end, int) {
          for (int64_t i = begin; i < end; ++i) ++runs[i];
        });
        EXPECT_EQ(runs, std::vector<int>(count, 1))
            << threads << " threads, count " << count << ", grain " << grain;
      }
    }
  }
}

TEST(ThreadPoolTest, CutsTheSameRunsForAnyNumberOfThreads) {
  for (const int threads : {1, 2, 4}) {
    ThreadPool pool(threads);
    std::vector<int64_t> end_of_run(10, -1);
    pool.ParallelFor(10, 4, [&](int64_t begin, int64_t end, int) { end_of_run[begin] = end; });
    EXPECT_EQ(end_of_run, (std::vector<int64_t>{4, -1, -1, -1, 8, -1, -1, -1, 10, -1}))
        << threads << " threads";
  }
}

TEST(ThreadPoolTest, RunsNothingForNoItems) {
  ThreadPool pool(2);
  int runs = 0;
  pool.ParallelFor(0, 1, [&](int64_t, int64_t, int) { ++runs; });
  pool.ParallelFor(-3, 1, [&](int64_t, int64_t, int) { ++runs; });
  EXPECT_EQ(runs, 0);
}

TEST(ThreadPoolTest, TakesAGrainOfZeroAsOne) {
  ThreadPool pool(2);
  std::vector<int> runs(5, 0);
  pool.ParallelFor(5, 0, [&](int64_t begin, int64_t end, int) {
    EXPECT_EQ(end, begin + 1);
    ++runs[begin];
  });
  EXPECT_EQ(runs, std::vector<int>(5, 1));
}

TEST(ThreadPoolTest, KeepsToItsBoundsOfThreads) {
  EXPECT_EQ(ThreadPool(0).num_threads(), 1);
  EXPECT_EQ(ThreadPool(-7).num_threads(), 1);
  EXPECT_EQ(ThreadPool(3).num_threads(), 3);
}

TEST(ThreadPoolTest, GivesEachThreadItsOwnNumber) {
  constexpr int kThreads = 4;
  ThreadPool pool(kThreads);
  std::vector<int64_t> items(kThreads, 0);  // Each cell belongs to one thread, so no lock.
  for (int loop = 0; loop < 200; ++loop) {
    pool.ParallelFor(64, 1, [&](int64_t, int64_t, int thread) {
      ASSERT_GE(thread, 0);
      ASSERT_LT(thread, kThreads);
      ++items[thread];
    });
  }
  EXPECT_EQ(std::accumulate(items.begin(), items.end(), int64_t{0}), 200 * 64);
}

TEST(ThreadPoolTest, RunsItemsOfOneLoopAtTheSameTime) {
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  // Each of the two items waits for the other: a pool that ran them in turn would never end. The
  // bound turns that into a failure.
  std::atomic<bool> met{true};
  pool.ParallelFor(2, 1, [&](int64_t, int64_t, int) {
    arrived.fetch_add(1);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (arrived.load() < 2) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() > deadline) {
        met.store(false);
        return;
      }
    }
  });
  EXPECT_TRUE(met.load());
}

TEST(ThreadPoolTest, ShowsTheCallerWhatTheBodiesWrote) {
  ThreadPool pool(3);
  std::vector<int64_t> values(257, 0);
  for (int64_t loop = 1; loop <= 500; ++loop) {
    pool.ParallelFor(257, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) values[i] += i * loop;
    });
    // Plain reads and writes between loops: ordered by the barrier alone.
    ASSERT_EQ(values[256], 256 * loop * (loop + 1) / 2);
    values[0] = loop;
    ASSERT_EQ(std::exchange(values[0], 0), loop);
  }
}

TEST(ThreadPoolTest, WakesWorkersThatHaveFallenAsleep) {
  ThreadPool pool(2);
  for (int round = 0; round < 20; ++round) {
    // Far longer than the 20 us that a worker spins.
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    std::atomic<int> arrived{0};
    std::atomic<int> on_worker{0};
    pool.ParallelFor(2, 1, [&](int64_t, int64_t, int thread) {
      arrived.fetch_add(1);
      const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (arrived.load() < 2 && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      if (thread == 1) on_worker.fetch_add(1);
    });
    ASSERT_EQ(on_worker.load(), 1) << "round " << round;
  }
}

TEST(ThreadPoolTest, WaitsForABodyThatSleeps) {
  ThreadPool pool(2);
  std::vector<int> ran(2, 0);
  for (int round = 0; round < 5; ++round) {
    pool.ParallelFor(2, 1, [&](int64_t begin, int64_t, int) {
      // One half sleeps, so that the caller gives up spinning and sleeps as well.
      if (begin == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
      ++ran[begin];
    });
    ASSERT_EQ(ran, std::vector<int>(2, round + 1));
  }
}

TEST(ThreadPoolTest, SurvivesManyShortLoops) {
  ThreadPool pool(2);
  std::atomic<int64_t> items{0};
  for (int loop = 0; loop < kManyLoops; ++loop) {
    pool.ParallelFor(2, 1, [&](int64_t, int64_t, int) { items.fetch_add(1); });
  }
  EXPECT_EQ(items.load(), int64_t{2} * kManyLoops);
}

TEST(ThreadPoolTest, EndsWhetherItsWorkersSpinOrSleepOrNeverRan) {
  for (int round = 0; round < 50; ++round) {
    const ThreadPool unused(3);
    auto spinning = std::make_unique<ThreadPool>(3);
    spinning->ParallelFor(3, 1, [](int64_t, int64_t, int) {});
    spinning.reset();
    ThreadPool sleeping(2);
    sleeping.ParallelFor(2, 1, [](int64_t, int64_t, int) {});
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

TEST(ThreadPoolTest, ServesCallersOnDifferentThreadsInTurn) {
  ThreadPool pool(2);
  Mutex turn;
  std::vector<int64_t> sums(2, 0);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&, caller] {
      for (int loop = 0; loop < 100; ++loop) {
        std::vector<int64_t> cells(16, 0);
        const MutexLock lock(turn);
        pool.ParallelFor(16, 1, [&](int64_t begin, int64_t, int) { cells[begin] = begin; });
        sums[caller] += std::accumulate(cells.begin(), cells.end(), int64_t{0});
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(sums, (std::vector<int64_t>{100 * 120, 100 * 120}));
}

}  // namespace
}  // namespace isthmus
