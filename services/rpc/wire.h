// SPDX-License-Identifier: Apache-2.0
// Values of the protocol in C++'s terms and in people's words.
#pragma once

#include <algorithm>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"
#include "proto/request.pb.h"
#include "services/base/urgency.h"

namespace isthmus::rpc {

// Whatever the other side has sent: negative and huge ones too.
absl::Duration FromWire(const google::protobuf::Duration& wire);

void ToWire(absl::Duration duration, google::protobuf::Duration* wire);

// Unspecified, and what this build does not know, is normal.
Priority PriorityOf(v1::Priority wire);
v1::Priority ToWire(Priority priority);

// How urgent the request of a ReserveCall or a PrefillCall that has just come is, by this machine's
// clock.
template <typename Call>
Urgency UrgencyOf(const Call& call, absl::Time now) {
  Urgency urgency;
  urgency.priority = PriorityOf(call.priority());
  if (call.has_time_left()) urgency.deadline = now + FromWire(call.time_left());
  // More makes no difference but to who is wrong.
  urgency.arrived = now - std::clamp(FromWire(call.waited()), absl::ZeroDuration(), absl::Hours(1));
  return urgency;
}

// The reverse of it.
template <typename Call>
void SetUrgency(const Urgency& urgency, absl::Time now, Call* call) {
  call->set_priority(ToWire(urgency.priority));
  ToWire(urgency.deadline - now, call->mutable_time_left());
  ToWire(now - urgency.arrived, call->mutable_waited());
}

// "prefill" or "decode", as in logs and metrics.
absl::string_view RoleName(v1::WorkerRole role);

// "ready", "draining", "suspect" or "refused", as in metrics.
absl::string_view WorkerStateName(v1::WorkerState state);

}  // namespace isthmus::rpc
