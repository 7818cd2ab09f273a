// SPDX-License-Identifier: Apache-2.0
#include "services/base/thread_pool.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "services/base/mutex.h"

namespace isthmus {
namespace {

constexpr auto kSpin = std::chrono::microseconds(20);
// Of State::inside: no loop takes workers in. Those that are inside still count on top of it.
constexpr int kClosed = 1 << 16;

// Spins until done() or for kSpin; the clock is read only now and then, as it costs more than a
// look at the flag.
template <typename Done>
bool SpinUntil(const Done& done) {
  const auto deadline = std::chrono::steady_clock::now() + kSpin;
  while (true) {
    for (int i = 0; i < 64; ++i) {
      if (done()) return true;
      _mm_pause();
    }
    if (std::chrono::steady_clock::now() >= deadline) return false;
  }
}

}  // namespace

struct ThreadPool::State {
  // The current loop. Written before `inside` is opened, read by those who are inside.
  const absl::FunctionRef<void(int64_t, int64_t, int)>* body = nullptr;
  int64_t count = 0;
  int64_t grain = 1;
  std::atomic<int64_t> next{0};

  std::atomic<uint64_t> epoch{0};  // Number of loops started.
  // Who takes part in the current loop: kClosed, or the number of workers inside. A worker that
  // wakes late finds it closed and stays out, so that no loop waits for a thread to be scheduled.
  std::atomic<int> inside{kClosed};
  std::atomic<bool> stop{false};

  Mutex mutex;
  CondVar wake;      // Workers sleep here for an epoch.
  CondVar finished;  // The caller sleeps here until nobody is inside.
  std::vector<std::thread> threads;
};

ThreadPool::ThreadPool(int num_threads)
    : num_threads_(std::clamp(num_threads, 1, 256)), state_(std::make_unique<State>()) {
  for (int i = 1; i < num_threads_; ++i) {
    state_->threads.emplace_back([this, i] { WorkerLoop(i); });
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(state_->mutex);
    state_->stop.store(true);
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

void ThreadPool::RunItems(int thread) {
  State& s = *state_;
  while (true) {
    const int64_t begin = s.next.fetch_add(s.grain);
    if (begin >= s.count) return;
    (*s.body)(begin, std::min(begin + s.grain, s.count), thread);
  }
}

void ThreadPool::WorkerLoop(int thread) {
  State& s = *state_;
  uint64_t seen = 0;
  while (true) {
    const auto ready = [&] { return s.epoch.load() != seen || s.stop.load(); };
    if (!SpinUntil(ready)) {
      MutexLock lock(s.mutex);
      s.wake.wait(lock, ready);
    }
    if (s.stop.load()) return;
    seen = s.epoch.load();
    int inside = s.inside.load();
    while (inside < kClosed && !s.inside.compare_exchange_weak(inside, inside + 1)) {
    }
    if (inside >= kClosed) continue;
    RunItems(thread);
    if (s.inside.fetch_sub(1) == kClosed + 1) {
      // The lock orders this with the caller's check before it sleeps.
      MutexLock lock(s.mutex);
      s.finished.notify_one();
    }
  }
}

void ThreadPool::ParallelFor(int64_t count, int64_t grain,
                             absl::FunctionRef<void(int64_t, int64_t, int)> body) {
  if (count <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  if (num_threads_ == 1 || count <= grain) {
    for (int64_t begin = 0; begin < count; begin += grain) {
      body(begin, std::min(begin + grain, count), 0);
    }
    return;
  }
  State& s = *state_;
  s.body = &body;
  s.count = count;
  s.grain = grain;
  s.next.store(0);
  s.inside.store(0);  // Opens the loop: nobody is inside, since the last one waited for that.
  {
    MutexLock lock(s.mutex);
    s.epoch.fetch_add(1);
  }
  s.wake.notify_all();
  RunItems(0);
  s.inside.fetch_add(kClosed);
  const auto done = [&] { return s.inside.load() == kClosed; };
  if (!SpinUntil(done)) {
    MutexLock lock(s.mutex);
    s.finished.wait(lock, done);
  }
}

}  // namespace isthmus
