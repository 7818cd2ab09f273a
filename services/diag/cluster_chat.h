// SPDX-License-Identifier: Apache-2.0
// A chat completion through a router (chat.h is the local one). Built only with gRPC.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "services/diag/chat.h"

namespace isthmus::diag {

// `address` is "host:port" of a router. Connects on the first call; every call has a deadline of
// ten minutes. The text of a reply is its reasoning and its content as the router parsed them.
ChatBackend ConnectClusterChat(const std::string& address);

}  // namespace isthmus::diag
