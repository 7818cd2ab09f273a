// SPDX-License-Identifier: Apache-2.0
// Values of the protocol in C++'s terms and in people's words.
#pragma once

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"

namespace isthmus::rpc {

// Whatever the other side has sent: negative and huge ones too.
absl::Duration FromWire(const google::protobuf::Duration& wire);

void ToWire(absl::Duration duration, google::protobuf::Duration* wire);

// "prefill" or "decode", as in logs and metrics.
absl::string_view RoleName(v1::WorkerRole role);

// "ready", "draining", "suspect" or "refused", as in metrics.
absl::string_view WorkerStateName(v1::WorkerState state);

}  // namespace isthmus::rpc
