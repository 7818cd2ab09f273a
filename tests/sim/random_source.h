// SPDX-License-Identifier: Apache-2.0
// Random numbers that are the same on every machine: the distributions of the standard library are
// not.
#pragma once

#include <cstdint>

#include "absl/time/time.h"
#include "services/base/check.h"

namespace isthmus::sim {

// SplitMix64. Not thread-safe; under a simulated world only one thread runs at a time.
class RandomSource {
 public:
  explicit RandomSource(uint64_t seed) : state_(seed) {}

  uint64_t Bits() {
    state_ += 0x9e3779b97f4a7c15;
    uint64_t bits = state_;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111eb;
    return bits ^ (bits >> 31);
  }

  // 0 to count - 1.
  uint64_t Below(uint64_t count) {
    ISTHMUS_CHECK(count > 0);
    return Bits() % count;
  }

  // Both ends are possible.
  int64_t Between(int64_t first, int64_t last) {
    ISTHMUS_CHECK(first <= last);
    return first + static_cast<int64_t>(Below(static_cast<uint64_t>(last - first) + 1));
  }
  absl::Duration Between(absl::Duration first, absl::Duration last) {
    return absl::Microseconds(
        Between(absl::ToInt64Microseconds(first), absl::ToInt64Microseconds(last)));
  }

  // True in `share` of all cases.
  bool Chance(double share) { return static_cast<double>(Bits() >> 11) * 0x1p-53 < share; }

 private:
  uint64_t state_;
};

}  // namespace isthmus::sim
