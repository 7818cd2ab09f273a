// SPDX-License-Identifier: Apache-2.0
// One run of a worker in a cluster under test: what a worker process consists of, over networks
// inside one process.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kvtransfer/transport_loopback.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/rpc/metrics_exporter.h"
#include "services/rpc/worker_client_in_process.h"
#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker.h"
#include "tests/sim/journal.h"
#include "tests/sim/page_watch.h"
#include "tests/sim/router_run.h"
#include "tests/sim/scenario.h"

namespace isthmus::sim {

// What all runs of a cluster share. All must outlive them.
struct Surroundings {
  const Scenario* scenario = nullptr;
  rpc::InProcessNetwork* calls = nullptr;
  transfer::LoopbackNetwork* pages = nullptr;
  PageWatch* watch = nullptr;
  const RouterSet* routers = nullptr;
  Journal* journal = nullptr;
  Clock* clock = nullptr;
};

class WorkerRun {
 public:
  // Starts to work and to register with every router. `address` is its name in both networks.
  WorkerRun(const std::string& address, v1::WorkerRole role, const Surroundings& around);
  ~WorkerRun() { Stop(); }

  const std::string& address() const { return address_; }
  v1::WorkerRole role() const { return role_; }

  // The registration streams end, and are opened again.
  void LoseRegistrations();

  // Ends all threads; calls that run may take `grace` to end. With the networks cut off before,
  // others see a process that died.
  void Stop(absl::Duration grace = absl::ZeroDuration());

  // Preemptions so far.
  uint64_t num_preemptions() const;

  // What is not given back yet; empty when nothing is missing.
  std::string MissingPages() const;

 private:
  rpc::WorkerMethods Methods();
  absl::Status ServeTokens(const v1::TokensHello& hello, const rpc::ServedCall& scope,
                           const rpc::TokenSink& sink);
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainCall& call);
  v1::WorkerLoad Load() const;

  template <typename Reply>
  absl::StatusOr<Reply> Counted(absl::string_view call, absl::StatusOr<Reply> reply) const {
    around_.journal->Count(
        absl::StrCat(call, " ", absl::StatusCodeToString(reply.status().code())));
    return reply;
  }

  // The worker's end of a registration stream, as services/rpc/registration_client.cc behaves.
  void KeepRegistered(size_t router);
  void HoldRegistration(RouterRun& router, router::ClusterView::Registration& registration);
  // False when the run ends.
  bool Pause(absl::Duration duration);

  const std::string address_;
  const v1::WorkerRole role_;
  const Surroundings around_;
  rpc::MetricsExporter metrics_;
  std::unique_ptr<worker::Worker> worker_;
  std::unique_ptr<worker::PrefillService> prefill_;
  std::unique_ptr<worker::DecodeService> decode_;
  v1::WorkerCard card_;
  std::unique_ptr<rpc::InProcessServer> server_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool ends_ = false;         // Guarded by mutex_.
  bool is_draining_ = false;  // Guarded by mutex_.
  int num_losses_ = 0;        // Guarded by mutex_.
  std::vector<Thread> threads_;
};

}  // namespace isthmus::sim
