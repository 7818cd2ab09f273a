// SPDX-License-Identifier: Apache-2.0
// Socket addresses as text, "127.0.0.1:4711" or "[::1]:4711"; internal to the UCX transport.
#pragma once

#include <sys/socket.h>

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::transfer {

struct SocketAddress {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// InvalidArgument: not a numeric address with a port.
absl::StatusOr<SocketAddress> ParseSocketAddress(absl::string_view text);

std::string FormatSocketAddress(const sockaddr_storage& storage);

// The address of the first of `devices` ("lo", "eth0,eth1") that has one, with port 0. Unavailable:
// none has.
absl::StatusOr<SocketAddress> AddressOfDevice(absl::string_view devices);

}  // namespace isthmus::transfer
