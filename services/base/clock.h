// SPDX-License-Identifier: Apache-2.0
// One clock that tests can replace. Every wait and every deadline of the project goes through it.
#pragma once

#include "absl/time/time.h"

namespace isthmus {

class Clock {
 public:
  virtual ~Clock() = default;

  // Wall time, for logs and deadlines that cross processes as durations.
  virtual absl::Time Now() = 0;

  // Sleeps for `duration` (returns at once when it is not positive).
  virtual void Sleep(absl::Duration duration) = 0;
};

// The machine's clock; lives as long as the process.
Clock& RealClock();

// Moves only when told to; Sleep() advances it.
class SimulatedClock : public Clock {
 public:
  explicit SimulatedClock(absl::Time start = absl::UnixEpoch()) : now_(start) {}
  absl::Time Now() override { return now_; }
  void Sleep(absl::Duration duration) override {
    if (duration > absl::ZeroDuration()) now_ += duration;
  }

 private:
  absl::Time now_;
};

}  // namespace isthmus
