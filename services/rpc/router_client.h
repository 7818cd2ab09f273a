// SPDX-License-Identifier: Apache-2.0
// The client side of the router's Generation service, for tools and tests. No gRPC type appears
// here.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/generate.pb.h"

namespace isthmus::rpc {

using OnDelta = std::function<void(const v1::TokenDelta& delta)>;

class RouterClient {
 public:
  explicit RouterClient(const std::string& address);
  ~RouterClient();

  // Stream the reply into `on_delta` and return its end. Errors carry the router's address; a
  // stream without an end is Internal.
  absl::StatusOr<v1::Finish> Chat(const v1::ChatRequest& request, absl::Duration timeout,
                                  const OnDelta& on_delta);
  absl::StatusOr<v1::Finish> Generate(const v1::GenerateRequest& request, absl::Duration timeout,
                                      const OnDelta& on_delta);
  absl::StatusOr<v1::StatusReply> Status(absl::Duration timeout);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace isthmus::rpc
