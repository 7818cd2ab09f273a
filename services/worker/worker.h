// SPDX-License-Identifier: Apache-2.0
// The engine host: one checkpoint, one cache, one step loop, one transport. Both gRPC services of a
// worker stand on it; its role is a state, not a type.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "kernels/core/workspace.h"
#include "kvtransfer/transport.h"
#include "proto/cluster.pb.h"
#include "services/base/clock.h"
#include "services/base/thread_pool.h"
#include "services/engine/engine.h"
#include "services/model/forward.h"
#include "services/model/weights.h"
#include "services/worker/step_loop.h"
#include "services/worker/worker_config.h"

namespace isthmus::worker {

class Worker {
 public:
  // Loads the checkpoint, sizes the cache, registers it with the transport and starts the step loop
  // and the thread that lets writes land. Errors name the config field or the file.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const WorkerConfig& config,
                                                        v1::WorkerRole role, Clock& clock);
  ~Worker();

  const WorkerConfig& config() const { return config_; }
  const v1::WorkerCard& card() const { return card_; }
  v1::WorkerRole role() const { return card_.role(); }
  transfer::Identity identity() const {
    return {card_.incarnation(), card_.values().layout_fingerprint()};
  }
  v1::WorkerLoad load() const;

  engine::Engine& engine() { return *engine_; }
  kv::CachePool& pool() { return *pool_; }
  StepLoop& loop() { return *loop_; }
  transfer::Transport& transport() { return *transport_; }
  Clock& clock() { return clock_; }

  // FailedPrecondition unless the worker has `role`: both roles are named.
  absl::Status CheckRole(v1::WorkerRole role) const;

  // Ends every sequence and both threads. Called once the server takes no more calls.
  void Stop();

 private:
  Worker(const WorkerConfig& config, Clock& clock) : config_(config), clock_(clock) {}
  absl::Status LoadModel();
  absl::Status OpenTransport();
  void FillCard(v1::WorkerRole role);

  const WorkerConfig config_;
  Clock& clock_;
  std::unique_ptr<ThreadPool> threads_;
  kernels::Workspace workspace_;
  std::unique_ptr<model::Weights> weights_;
  std::unique_ptr<model::ModelForward> forward_;
  std::unique_ptr<kv::CachePool> pool_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<StepLoop> loop_;
  std::unique_ptr<transfer::Transport> transport_;
  v1::TransferEndpoint endpoint_;
  v1::WorkerCard card_;
  std::atomic<bool> stops_ = false;
  std::thread poll_thread_;
};

}  // namespace isthmus::worker
