// SPDX-License-Identifier: Apache-2.0
// One clock that tests can replace. Every wait, every deadline and every thread that waits goes
// through it, so that a simulation can run the real code in its own time and order.
#pragma once

#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "services/base/mutex.h"

namespace isthmus {

class Clock {
 public:
  virtual ~Clock() = default;

  // Wall time at the start of the process plus what has passed since, so it never jumps: for logs,
  // and for deadlines, which cross processes as durations.
  virtual absl::Time Now() = 0;

  // Sleeps for `duration` (returns at once when it is not positive).
  virtual void Sleep(absl::Duration duration) = 0;

  // Waits until `is_done`, for at most `timeout`, and returns what `is_done` then says. `lock` is
  // held whenever `is_done` runs and on return; who changes its answer notifies `changed`. No other
  // lock may be held across the wait.
  virtual bool WaitFor(CondVar& changed, MutexLock& lock, absl::Duration timeout,
                       absl::FunctionRef<bool()> is_done) = 0;

  // What a thread that was started for `body` shall run (thread.h): a simulation takes it into its
  // schedule first.
  virtual std::function<void()> Adopt(std::function<void()> body) { return body; }
};

// The machine's clock; lives as long as the process.
Clock& RealClock();

// Moves only when told to; Sleep() advances it. WaitFor waits for other threads in real time.
class SimulatedClock : public Clock {
 public:
  explicit SimulatedClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() override;
  void Sleep(absl::Duration duration) override;
  bool WaitFor(CondVar& changed, MutexLock& lock, absl::Duration timeout,
               absl::FunctionRef<bool()> is_done) override;

 private:
  Mutex mutex_;
  absl::Time now_;  // Guarded by mutex_.
};

}  // namespace isthmus
