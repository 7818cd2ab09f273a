// SPDX-License-Identifier: Apache-2.0
// Routers, prefill and decode workers in one process, with the clients and the misfortunes of a
// scenario. Runs on any clock: a simulated world's, or the machine's with real threads.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "kvtransfer/transport_loopback.h"
#include "router/accept.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/thread.h"
#include "services/rpc/worker_client_in_process.h"
#include "tests/sim/client_run.h"
#include "tests/sim/journal.h"
#include "tests/sim/page_watch.h"
#include "tests/sim/random_source.h"
#include "tests/sim/router_run.h"
#include "tests/sim/scenario.h"
#include "tests/sim/worker_run.h"

namespace isthmus::sim {

class Cluster {
 public:
  // All must outlive the cluster. What must never happen is put into the journal as a violation.
  Cluster(const Scenario& scenario, const router::Acceptor* acceptor, Clock& clock,
          Journal* journal);
  ~Cluster();

  // Until every router could place a request.
  void Start();

  // All clients and misfortunes, to the end of the last one.
  void Play();

  // In fair weather: all pages come back, nobody holds anything, a fresh request is served.
  void Settle();

  PageWatch& watch() { return watch_; }
  uint64_t num_replies() const { return num_replies_; }

 private:
  struct Slot {
    std::string address;
    v1::WorkerRole role = v1::WORKER_ROLE_UNSPECIFIED;
    std::unique_ptr<WorkerRun> run;  // Null while somebody has it in hand. Guarded by mutex_.
  };

  rpc::Passage PassageOf(const rpc::InProcessMessage& message);
  transfer::LoopbackFate FateOf(const transfer::LoopbackWrite& write);
  void StartRouter(size_t index);
  void StartWorker(Slot& slot);
  std::unique_ptr<WorkerRun> Take(Slot& slot);
  void Put(Slot& slot, std::unique_ptr<WorkerRun> run);

  void Suffer(const Misfortune& misfortune);
  void Kill(Slot& slot, const Misfortune& misfortune);
  void Drain(Slot& slot, const Misfortune& misfortune);
  void RestartRouter(const Misfortune& misfortune);
  void CutCalls(Slot& slot, const Misfortune& misfortune);
  void CutPages(Slot& slot, const Misfortune& misfortune);
  void Ask(size_t index);
  Excuses ExcusesOf(const ClientPlan& plan) const;
  // Waits until `problem` has none to tell; else it is a violation.
  void Await(absl::string_view what, absl::Duration patience,
             const std::function<std::string()>& problem);
  std::string OpenEnds();

  const Scenario scenario_;
  const router::Acceptor* const acceptor_;
  Clock& clock_;
  Journal* const journal_;
  PageWatch watch_;
  rpc::InProcessNetwork calls_;
  transfer::LoopbackNetwork pages_;
  RouterSet routers_;
  std::atomic<bool> is_fair_ = false;
  std::atomic<uint64_t> num_replies_ = 0;

  Mutex mutex_;
  RandomSource random_;               // Guarded by mutex_.
  std::vector<int> num_router_runs_;  // Guarded by mutex_.
  std::vector<std::unique_ptr<Slot>> slots_;
};

}  // namespace isthmus::sim
