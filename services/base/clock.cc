// SPDX-License-Identifier: Apache-2.0
#include "services/base/clock.h"

#include <algorithm>
#include <chrono>

#include "absl/time/clock.h"

namespace isthmus {
namespace {

// Longer waits would overflow the arithmetic of std::chrono.
constexpr absl::Duration kLongestWait = absl::Hours(24 * 365);

bool WaitInRealTime(CondVar& changed, MutexLock& lock, absl::Duration timeout,
                    absl::FunctionRef<bool()> is_done) {
  const auto patience =
      absl::ToChronoNanoseconds(std::clamp(timeout, absl::ZeroDuration(), kLongestWait));
  return changed.wait_for(lock, patience, [&is_done] { return is_done(); });
}

class MachineClock : public Clock {
 public:
  absl::Time Now() override {
    return start_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_start_);
  }
  void Sleep(absl::Duration duration) override {
    if (duration > absl::ZeroDuration()) absl::SleepFor(duration);
  }
  bool WaitFor(CondVar& changed, MutexLock& lock, absl::Duration timeout,
               absl::FunctionRef<bool()> is_done) override {
    return WaitInRealTime(changed, lock, timeout, is_done);
  }

 private:
  const absl::Time start_ = absl::Now();
  const std::chrono::steady_clock::time_point steady_start_ = std::chrono::steady_clock::now();
};

}  // namespace

Clock& RealClock() {
  static MachineClock clock;
  return clock;
}

absl::Time SimulatedClock::Now() {
  MutexLock lock(mutex_);
  return now_;
}

void SimulatedClock::Sleep(absl::Duration duration) {
  MutexLock lock(mutex_);
  if (duration > absl::ZeroDuration()) now_ += duration;
}

bool SimulatedClock::WaitFor(CondVar& changed, MutexLock& lock, absl::Duration timeout,
                             absl::FunctionRef<bool()> is_done) {
  return WaitInRealTime(changed, lock, timeout, is_done);
}

}  // namespace isthmus
