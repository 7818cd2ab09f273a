// SPDX-License-Identifier: Apache-2.0
// A gRPC server as every process of the project runs it: bounded threads, grpc.health.v1 with the
// services "liveness", "readiness" and "", reflection, a port that may be 0, and a stop that is
// bounded in time.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace isthmus::rpc {

struct ServerOptions {
  // "host:port"; port 0 takes a free one.
  std::string address = "127.0.0.1:0";

  // Calls at one time beyond this are answered RESOURCE_EXHAUSTED by gRPC itself.
  int max_threads = 64;
};

// Sends what gRPC itself logs through our log, from warnings up. Called first thing in main.
void RouteGrpcLog();

class RpcServer {
 public:
  // Listens and serves at once; not ready yet. `services` must outlive the server. Warns when other
  // machines can reach the address, since there is no TLS. InvalidArgument: it is not host:port.
  // Unavailable: the address is taken or does not exist.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(
      const ServerOptions& options, const std::vector<grpc::Service*>& services);
  ~RpcServer();

  // "host:port" with the real port.
  const std::string& address() const { return address_; }

  // What the health service answers for "readiness" and for "".
  void SetReady(bool is_ready);
  bool is_ready() const { return is_ready_; }

  // What it answers for "liveness": live from the start on.
  void SetLive(bool is_live);
  bool is_live() const { return is_live_; }

  // Not ready, no new calls; running ones get `patience`, then they are cancelled.
  void Stop(absl::Duration patience);

 private:
  RpcServer() = default;

  std::unique_ptr<grpc::Server> server_;
  std::string address_;
  std::atomic<bool> is_ready_ = false;
  std::atomic<bool> is_live_ = true;
};

}  // namespace isthmus::rpc
