// SPDX-License-Identifier: Apache-2.0
// Channels between the processes, set up alike everywhere: keepalive that both ends agree on, no
// proxy from the environment, no hidden retries, message sizes that a long prompt fits into.
#pragma once

#include <grpcpp/channel.h>

#include <memory>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace isthmus::rpc {

// A prompt of a million tokens, each a varint of at most three bytes, and room to spare.
inline constexpr int kMaxMessageBytes = 64 << 20;

// `address` is "host:port". Connects on first use; a lost connection is tried again with a pause of
// at most two seconds.
std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address);

// Whether `address` is host:port with a port from 1 to 65535. gRPC would take port 99999 for 34463.
bool IsHostPort(absl::string_view address);

// Whether only this machine can reach `address` ("127.0.0.1:0", "localhost:1", "[::1]:2").
bool IsLoopback(absl::string_view address);

// "host:port" of a listener with its real port in place of the configured one.
std::string WithPort(absl::string_view address, int port);

// What is left of `timeout` for the next hop after `elapsed`, less 2 % and at least 1 ms for the
// way back, so that the inner call ends first and its error is the one that arrives. Never
// negative.
absl::Duration HopTimeout(absl::Duration timeout, absl::Duration elapsed);

}  // namespace isthmus::rpc
