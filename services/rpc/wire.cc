// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/wire.h"

namespace isthmus::rpc {

absl::Duration FromWire(const google::protobuf::Duration& wire) {
  return absl::Seconds(wire.seconds()) + absl::Nanoseconds(wire.nanos());
}

void ToWire(absl::Duration duration, google::protobuf::Duration* wire) {
  wire->set_seconds(absl::ToInt64Seconds(duration));
  wire->set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(duration % absl::Seconds(1))));
}

Priority PriorityOf(v1::Priority wire) {
  switch (wire) {
    case v1::PRIORITY_HIGH:
      return Priority::kHigh;
    case v1::PRIORITY_LOW:
      return Priority::kLow;
    default:
      return Priority::kNormal;
  }
}

v1::Priority ToWire(Priority priority) {
  switch (priority) {
    case Priority::kHigh:
      return v1::PRIORITY_HIGH;
    case Priority::kLow:
      return v1::PRIORITY_LOW;
    default:
      return v1::PRIORITY_NORMAL;
  }
}

absl::string_view RoleName(v1::WorkerRole role) {
  return role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode";
}

absl::string_view WorkerStateName(v1::WorkerState state) {
  switch (state) {
    case v1::WORKER_STATE_READY:
      return "ready";
    case v1::WORKER_STATE_DRAINING:
      return "draining";
    case v1::WORKER_STATE_REFUSED:
      return "refused";
    default:
      return "suspect";
  }
}

}  // namespace isthmus::rpc
