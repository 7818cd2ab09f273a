// SPDX-License-Identifier: Apache-2.0
// Who goes first where not all can, the same everywhere: in the router's lines, among a worker's
// waiting prompts, in a step, and, from the other end, when somebody has to give pages back.
//
// The order is one moment per request, its due time, which never changes. So it is total, a line
// stays sorted, and nobody waits for ever: whoever arrives more than five patiences later is
// behind.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>

#include "absl/time/time.h"

namespace isthmus {

enum class Priority : uint8_t { kHigh, kNormal, kLow };
inline constexpr int kNumPriorities = 3;

// By one clock, and the moments of two machines are never compared.
struct Urgency {
  Priority priority = Priority::kNormal;
  absl::Time deadline = absl::InfiniteFuture();
  absl::Time arrived = absl::UnixEpoch();
};

// How long a request bears that others of its class with nearer deadlines go first. Deadlines that
// are further away than this count as so far away.
inline constexpr absl::Duration kPatience = absl::Minutes(1);

// Inside a class by deadline. A class is two patiences: among requests that arrive within one
// patience the class alone decides, and a longer wait makes up for a lower class.
inline absl::Time DueTime(const Urgency& urgency) {
  const absl::Time latest = urgency.arrived + kPatience;
  return std::clamp(urgency.deadline, urgency.arrived, latest) +
         2 * kPatience * static_cast<int>(urgency.priority);
}

// Strict and total but for requests that are equal in everything.
inline bool GoesBefore(const Urgency& a, const Urgency& b) {
  return std::make_tuple(DueTime(a), a.deadline, a.arrived) <
         std::make_tuple(DueTime(b), b.deadline, b.arrived);
}

// Whether a running request gives way to a newcomer that has no room. Inside a class nobody does,
// and neither does who has waited for so long that the newcomer would be behind it in a line.
inline bool GivesWay(const Urgency& running, const Urgency& newcomer) {
  return running.priority > newcomer.priority && GoesBefore(newcomer, running);
}

}  // namespace isthmus
