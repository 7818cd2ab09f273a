// SPDX-License-Identifier: Apache-2.0
// Values of the protocol in C++'s terms and in people's words.
#pragma once

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

// How urgent a request is, by this machine's clock. `time_left`, which may be null, counts from
// now.
Urgency UrgencyOf(v1::Priority priority, const google::protobuf::Duration* time_left,
                  absl::Time now);

// Of a ReserveCall or a PrefillCall that has just come.
template <typename Call>
Urgency UrgencyOf(const Call& call, absl::Time now) {
  return UrgencyOf(call.priority(), call.has_time_left() ? &call.time_left() : nullptr, now);
}

// "prefill" or "decode", as in logs and metrics.
absl::string_view RoleName(v1::WorkerRole role);

// "ready", "draining", "suspect" or "refused", as in metrics.
absl::string_view WorkerStateName(v1::WorkerState state);

}  // namespace isthmus::rpc
