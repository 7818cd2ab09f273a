// SPDX-License-Identifier: Apache-2.0
// Fault scope: what an error spoils. The place that meets an error names it; callers decide by it.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isthmus {

enum class FaultScope : uint8_t {
  kRequest,  // Fail this request. Nothing else is affected.
  kPeer,     // One other process is gone or wrong. Retry the request elsewhere.
  kDevice,   // This GPU's state is lost. Drain and restart this process.
  kProcess,  // An invariant of ours is broken. Exit now; the supervisor restarts us.
};

// Attaches a scope to a non-OK status. The innermost scope wins: a second call changes nothing.
absl::Status WithFaultScope(absl::Status status, FaultScope scope);

// The attached scope, or kRequest when nobody attached one.
FaultScope FaultScopeOf(const absl::Status& status);

// Attached to a RESOURCE_EXHAUSTED: others give way to this caller, who should ask here again.
absl::Status WithRoomSoon(absl::Status status);
bool HasRoomSoon(const absl::Status& status);

// "request", "peer", "device" or "process", as on the wire and in logs.
absl::string_view FaultScopeName(FaultScope scope);

}  // namespace isthmus
