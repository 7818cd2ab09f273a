// SPDX-License-Identifier: Apache-2.0
// The gRPC side of a worker: its three services, as thin as they can be.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "services/worker/decode_service.h"
#include "services/worker/drain.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker.h"

namespace grpc {
class Service;
}  // namespace grpc

namespace isthmus::worker {

class WorkerRpc {
 public:
  // All must outlive it.
  WorkerRpc(Worker* worker, PrefillService* prefill, DecodeService* decode, Drain* drain);
  ~WorkerRpc();

  // For rpc::RpcServer::Start.
  std::vector<grpc::Service*> services() const;

  // The worker's card with the address that routers shall use, which is known once the server
  // listens. Until then calls show a card without one.
  void SetAddress(const std::string& address);
  v1::WorkerCard card() const;

  // Threads that the server needs at most: every call holds one, token streams and waiting prompts
  // for long.
  static int MaxThreads(const WorkerConfig& config);

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace isthmus::worker
