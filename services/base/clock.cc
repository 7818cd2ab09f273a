// SPDX-License-Identifier: Apache-2.0
#include "services/base/clock.h"

#include "absl/time/clock.h"

namespace isthmus {
namespace {

class MachineClock : public Clock {
 public:
  absl::Time Now() override { return absl::Now(); }
  void Sleep(absl::Duration duration) override {
    if (duration > absl::ZeroDuration()) absl::SleepFor(duration);
  }
};

}  // namespace

Clock& RealClock() {
  static MachineClock clock;
  return clock;
}

}  // namespace isthmus
