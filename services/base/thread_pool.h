// SPDX-License-Identifier: Apache-2.0
// A fork-join pool for kernels. Decode has some 60 barriers a step, so a barrier must cost
// microseconds: workers spin for at most 20 us for the next loop, then sleep, since three
// processes may share two cores.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"

namespace isthmus {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread: 1 starts no thread at all. Clamped to [1, 256].
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs body(begin, end, thread) over [0, count) cut into runs of `grain` items, on all threads,
  // and returns when all are done. `thread` is in [0, num_threads()), for scratch indexed by
  // thread. The cut does not depend on the number of threads, so neither does any result that is
  // computed per item. Called by one thread at a time; never from inside a body.
  void ParallelFor(int64_t count, int64_t grain,
                   absl::FunctionRef<void(int64_t begin, int64_t end, int thread)> body);

 private:
  struct State;
  void RunItems(int thread);
  void WorkerLoop(int thread);

  int num_threads_;
  std::unique_ptr<State> state_;
};

}  // namespace isthmus
