// SPDX-License-Identifier: Apache-2.0
#include "services/base/fault.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"

namespace isthmus {
namespace {

constexpr absl::string_view kPayloadUrl = "isthmus/fault-scope";
constexpr absl::string_view kRoomUrl = "isthmus/room-soon";
constexpr absl::string_view kNames[] = {"request", "peer", "device", "process"};

}  // namespace

absl::Status WithFaultScope(absl::Status status, FaultScope scope) {
  if (status.ok() || status.GetPayload(kPayloadUrl).has_value()) return status;
  status.SetPayload(kPayloadUrl, absl::Cord(FaultScopeName(scope)));
  return status;
}

FaultScope FaultScopeOf(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kPayloadUrl);
  if (!payload.has_value()) return FaultScope::kRequest;
  for (uint8_t i = 0; i < 4; ++i) {
    if (*payload == kNames[i]) return static_cast<FaultScope>(i);
  }
  return FaultScope::kRequest;
}

absl::Status WithRoomSoon(absl::Status status) {
  if (!status.ok()) status.SetPayload(kRoomUrl, absl::Cord("true"));
  return status;
}

bool HasRoomSoon(const absl::Status& status) { return status.GetPayload(kRoomUrl).has_value(); }

absl::string_view FaultScopeName(FaultScope scope) { return kNames[static_cast<uint8_t>(scope)]; }

}  // namespace isthmus
