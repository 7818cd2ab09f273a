// SPDX-License-Identifier: Apache-2.0
// What the router knows about the workers: who they are, whether they answer, whether their tokens
// flow. Workers are named by configuration and asked now and then; discovery comes later.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/cluster.pb.h"
#include "proto/generate.pb.h"
#include "router/router_config.h"
#include "router/token_relay.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/rpc/worker_client.h"

namespace isthmus::router {

// One worker. Its card changes when it is restarted; everything else is fixed.
class WorkerLink {
 public:
  WorkerLink(std::unique_ptr<rpc::WorkerClient> client, v1::WorkerRole role)
      : client_(std::move(client)), role_(role) {}

  rpc::WorkerClient& client() { return *client_; }
  v1::WorkerRole role() const { return role_; }
  TokenRelay& relay() { return relay_; }

  // Address, reachability, card and load, and why it cannot be used.
  v1::WorkerStatus status() const;

  void SetDescribed(const absl::StatusOr<v1::DescribeReply>& reply);
  void SetStreamOpen(bool is_open);

 private:
  const std::unique_ptr<rpc::WorkerClient> client_;
  const v1::WorkerRole role_;
  TokenRelay relay_;  // Decode workers.
  mutable Mutex mutex_;
  bool is_stream_open_ = false;  // Guarded by mutex_.
  v1::WorkerStatus status_;      // Guarded by mutex_.
};

class ClusterView {
 public:
  ClusterView(const RouterConfig& config, Clock& clock);
  ~ClusterView();

  void Start();
  void Stop();

  // This run of the router, as the workers know it.
  uint64_t incarnation() const { return incarnation_; }

  std::vector<std::shared_ptr<WorkerLink>> links() const { return links_; }

 private:
  void Watch(WorkerLink& link);
  void ReadTokens(WorkerLink& link);
  void WaitOrStop(absl::Duration duration);

  const RouterConfig config_;
  Clock& clock_;
  const uint64_t incarnation_;
  std::vector<std::shared_ptr<WorkerLink>> links_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stops_ = false;
  Mutex mutex_;
  CondVar stopped_;
};

}  // namespace isthmus::router
