// SPDX-License-Identifier: Apache-2.0
// What a server tells the service manager that started it (systemd, Type=notify). Started in any
// other way, by hand or in a container, these calls do nothing.
#pragma once

#include "absl/strings/string_view.h"

namespace isthmus::rpc {

// The process serves; what waits for its unit may start. `status` is one line for `systemctl
// status`; line breaks in it become spaces. May be called again with another line.
void NotifyReady(absl::string_view status);

// The process has begun to drain; the manager now counts TimeoutStopSec.
void NotifyStopping();

// The process is not stuck. Without this call for WatchdogSec the manager restarts the unit, so
// call it several times in that span, and only while the server is live. Never blocks for long.
void NotifyAlive();

}  // namespace isthmus::rpc
