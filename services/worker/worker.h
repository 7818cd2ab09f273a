// SPDX-License-Identifier: Apache-2.0
// The engine host: one forward pass, one cache, one step loop, one transport. Both gRPC services of
// a worker stand on it; its role is a state, not a type.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/core/workspace.h"
#include "kvtransfer/transport.h"
#include "proto/cluster.pb.h"
#include "services/base/clock.h"
#include "services/base/patch.h"
#include "services/base/thread.h"
#include "services/base/thread_pool.h"
#include "services/engine/admission.h"
#include "services/engine/engine.h"
#include "services/engine/memory_plan.h"
#include "services/model/device_context.h"
#include "services/model/device_weights.h"
#include "services/model/forward.h"
#include "services/model/weights.h"
#include "services/worker/page_staging.h"
#include "services/worker/rank_group.h"
#include "services/worker/step_loop.h"
#include "services/worker/worker_config.h"

namespace isthmus::worker {

// What a worker is put together from besides its configuration.
struct WorkerParts {
  std::unique_ptr<transfer::Transport> transport;

  // Null: the one that config.model_kind names. Else its fingerprint and end token are the next.
  std::unique_ptr<model::Forward> forward;
  uint64_t checkpoint_fingerprint = 0;
  int32_t end_token_id = 1;

  // 0: random.
  uint64_t incarnation = 0;

  // Called after every step, on the loop's thread; may be empty.
  StepObserver on_step;
};

class Worker {
 public:
  // For a process: over UCX, as configured. Errors name the config field or the file.
  static absl::StatusOr<std::unique_ptr<Worker>> Create(const WorkerConfig& config,
                                                        v1::WorkerRole role, Clock& clock,
                                                        StepObserver on_step = {});

  // Takes the model, sizes the cache, registers a decode worker's with the transport and starts the
  // step loop and the thread that lets writes land. All waits are the clock's, which must outlive
  // the worker.
  static absl::StatusOr<std::unique_ptr<Worker>> Assemble(const WorkerConfig& config,
                                                          v1::WorkerRole role, WorkerParts parts,
                                                          Clock& clock);
  ~Worker();

  const WorkerConfig& config() const { return config_; }
  // Without an address.
  const v1::WorkerCard& card() const { return card_; }
  v1::WorkerRole role() const { return card_.role(); }
  transfer::Identity identity() const {
    return {card_.incarnation(), card_.values().layout_fingerprint()};
  }
  // What the step loop and the pools know; the services add theirs (worker_load.h).
  v1::WorkerLoad load() const;

  engine::Engine& engine() { return *engine_; }
  // What the pools were created from.
  const engine::MemoryPlan& plan() const { return plan_; }
  // Of a decode worker's sequences.
  engine::Admission& admission() { return *admission_; }
  kv::CachePool& pool() { return *pool_; }
  const kv::CachePool& pool() const { return *pool_; }
  StepLoop& loop() { return *loop_; }
  transfer::Transport& transport() { return *transport_; }
  // What pages of a GPU travel through; null when pages lie in host memory.
  PageStaging* staging() { return staging_.get(); }
  Clock& clock() { return clock_; }

  // FailedPrecondition unless the worker has `role`: both roles are named.
  absl::Status CheckRole(v1::WorkerRole role) const;

  // Whether the step loop got anywhere within config.liveness_timeout, or has nothing to do.
  bool is_live() const;

  // Ends every sequence with UNAVAILABLE; the services can still send what that leads to.
  void StopSteps();

  // StopSteps, and no write of others lands any more. Called once the server takes no more calls.
  void Stop();

 private:
  Worker(const WorkerConfig& config, Clock& clock) : config_(config), clock_(clock) {}
  absl::Status TakeModel(WorkerParts& parts);
  absl::Status LoadCheckpoint(const model::ModelConfig& model);
  absl::Status OpenDevice(int device);
  absl::Status OpenRanks(const std::vector<int>& devices);
  // The GPU, or that of rank 0; null on the CPU.
  const model::DeviceContext* device() const;
  absl::Status BuildEngine(int32_t end_token_id);
  absl::Status Publish(uint64_t incarnation, v1::WorkerRole role);
  void FillCard(v1::WorkerRole role);
  void PollTransport();

  const WorkerConfig config_;
  Clock& clock_;
  std::unique_ptr<ThreadPool> threads_;
  kernels::Workspace workspace_;
  PatchSet patches_;
  std::unique_ptr<model::DeviceContext> device_;  // Null on the CPU, and with ranks_.
  std::unique_ptr<model::Weights> weights_;
  std::unique_ptr<model::DeviceWeights> device_weights_;
  std::unique_ptr<RankGroup> ranks_;  // Null unless config.tp is more than one.
  std::unique_ptr<model::Forward> forward_;
  engine::MemoryPlan plan_;
  std::unique_ptr<kv::CachePool> pool_;
  std::unique_ptr<PageStaging> staging_;
  std::unique_ptr<engine::Engine> engine_;
  std::unique_ptr<engine::Admission> admission_;
  std::unique_ptr<StepLoop> loop_;
  std::unique_ptr<transfer::Transport> transport_;
  v1::WorkerCard card_;
  std::atomic<bool> stops_ = false;
  Thread poll_thread_;
};

}  // namespace isthmus::worker
