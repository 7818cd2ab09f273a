// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace isthmus::rpc {

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // Despite its name this is the patience for one attempt: on a busy machine a handshake over
  // loopback can take longer than the first pause between attempts.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  // Two channels to one address must not share a connection that a restarted worker has broken.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(kMaxMessageBytes);
  arguments.SetMaxSendMessageSize(kMaxMessageBytes);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

bool IsHostPort(absl::string_view address) {
  const size_t colon = address.rfind(':');
  uint32_t port = 0;
  return colon != absl::string_view::npos && colon > 0 &&
         absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 && port <= 65535;
}

bool IsLoopback(absl::string_view address) {
  const absl::string_view host = address.substr(0, std::min(address.rfind(':'), address.size()));
  return absl::StartsWith(host, "127.") || host == "localhost" || host == "[::1]";
}

std::string WithPort(absl::string_view address, int port) {
  return absl::StrCat(address.substr(0, std::min(address.rfind(':'), address.size())), ":", port);
}

absl::Duration HopTimeout(absl::Duration timeout, absl::Duration elapsed) {
  const absl::Duration left = timeout - elapsed;
  const absl::Duration way_back = std::max(absl::Milliseconds(1), left / 50);
  return std::max(absl::ZeroDuration(), left - way_back);
}

}  // namespace isthmus::rpc
