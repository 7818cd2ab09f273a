// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/supervisor.h"

#include <systemd/sd-daemon.h>

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"

namespace isthmus::rpc {
namespace {

// Longer lines are of no use in a status display, and a datagram has a limit.
constexpr size_t kMaxStatusBytes = 512;

// The library alone reads NOTIFY_SOCKET. A message that cannot be sent is dropped: the manager has
// then gone or never was, and the server's work does not depend on it.
void Tell(const std::string& state) { (void)sd_notify(/*unset_environment=*/0, state.c_str()); }

}  // namespace

void NotifyReady(absl::string_view status) {
  std::string line(status.substr(0, kMaxStatusBytes));
  // A line break would begin another assignment.
  std::replace_if(
      line.begin(), line.end(), [](char c) { return c == '\n' || c == '\r' || c == '\0'; }, ' ');
  Tell(absl::StrCat("READY=1\nSTATUS=", line));
}

void NotifyStopping() { Tell("STOPPING=1\nSTATUS=draining"); }

void NotifyAlive() { Tell("WATCHDOG=1"); }

}  // namespace isthmus::rpc
