// SPDX-License-Identifier: Apache-2.0
// The router's gRPC services: Generation for clients, Registration for workers. What they mean is
// in router.h and cluster_view.h.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "router/cluster_view.h"
#include "router/router.h"
#include "router/router_config.h"
#include "services/rpc/server.h"

namespace isthmus::router {

class RouterServer {
 public:
  // Listens and serves at once, not ready yet. `router` and `view` must outlive the server. Errors
  // are RpcServer's.
  static absl::StatusOr<std::unique_ptr<RouterServer>> Start(const RouterConfig& config,
                                                             Router* router, ClusterView* view);
  ~RouterServer();

  rpc::RpcServer& rpc();

  // Ends the registration streams, gives calls `patience` and cancels what still runs then.
  void Stop(absl::Duration patience);

 private:
  struct State;
  explicit RouterServer(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

}  // namespace isthmus::router
