// SPDX-License-Identifier: Apache-2.0
// A clock under which real threads run one at a time, in an order and at times that a seed decides.
// The same seed gives the same order, so what goes wrong once goes wrong again.
//
// A thread runs until it waits (Sleep, WaitFor), takes a lock (mutex.h) or ends. Then one of those
// that could go on is drawn; when there is none, time jumps to the next end of a wait. Since all
// others stand still meanwhile, the draw may ask every waiting thread's condition itself.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "tests/sim/random_source.h"

namespace isthmus::sim {

struct WorldOptions {
  uint64_t seed = 1;

  // More draws mean that threads keep each other awake for ever.
  int64_t max_steps = 2'000'000;

  // Share of locks before which another thread may go first.
  double lock_yield_share = 0.05;

  // Share of waits that are over at once and that give way to others nevertheless.
  double yield_share = 0.25;

  // Share of draws after which the thread only goes on a little later, as on a busy machine.
  double stall_share = 0.002;
  absl::Duration longest_stall = absl::Milliseconds(30);

  // Prints every event and every draw to stderr.
  bool trace = false;
};

// One world at a time; threads of it must not wait by any other means than its clock. Misuse, a
// deadlock and endless running end the process with a report of where each thread stands.
class SimulatedWorld : public Clock {
 public:
  explicit SimulatedWorld(const WorldOptions& options);
  ~SimulatedWorld() override;

  // Runs `body` as the first thread. All threads that were started must have been joined when it
  // returns.
  void Run(const std::function<void()>& body);

  absl::Time Now() override;
  void Sleep(absl::Duration duration) override;
  bool WaitFor(CondVar& changed, MutexLock& lock, absl::Duration timeout,
               absl::FunctionRef<bool()> is_done) override;
  std::function<void()> Adopt(std::function<void()> body) override;

  // Called before every draw, when no thread runs or holds a lock.
  void CheckEachStep(std::function<void()> check) { step_check_ = std::move(check); }

  // Puts an event into the trace, which is what two runs of a seed are compared by.
  void Note(absl::string_view event);

  // Names the running thread in reports.
  void NameThread(absl::string_view name);

  // The number of the running thread: 0 for the first, then as they were adopted.
  int thread_number() const;

  uint64_t trace_hash() const { return trace_hash_; }
  int64_t num_steps() const { return num_steps_; }

  // Prints the trace's hash, the time and the stack of every thread to stderr.
  void ReportThreads();

 private:
  struct Task;

  static void YieldAtLock();

  void Park(Task& task);
  void End(Task& task);
  static void PassTo(Task& next);
  static void AwaitTurn(Task& task);
  Task& Draw();
  bool CanGoOn(Task& task);
  void FoldIntoTrace(uint64_t bits);
  [[noreturn]] void Fail(absl::string_view what);

  const WorldOptions options_;
  // Everything below belongs to the thread that has the turn; taking turns orders the accesses.
  RandomSource random_;
  absl::Time now_;
  int64_t num_steps_ = 0;
  uint64_t trace_hash_ = 0xcbf29ce484222325;
  std::vector<std::unique_ptr<Task>> tasks_;
  std::vector<Task*> alive_;
  std::vector<Task*> able_;  // Of one draw; kept for its memory.
  std::function<void()> step_check_;
  bool is_drawing_ = false;
  Task* reporter_ = nullptr;  // Others print their stacks for it.
};

}  // namespace isthmus::sim
