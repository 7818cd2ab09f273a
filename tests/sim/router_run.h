// SPDX-License-Identifier: Apache-2.0
// One run of a router in a cluster under test.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "router/accept.h"
#include "router/cluster_view.h"
#include "router/router.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/rpc/metrics_exporter.h"
#include "services/rpc/worker_client_in_process.h"
#include "tests/sim/scenario.h"

namespace isthmus::sim {

class RouterRun {
 public:
  // `name` is its end of every connection. All must outlive the run.
  RouterRun(std::string name, const Scenario& scenario, const router::Acceptor* acceptor,
            rpc::InProcessNetwork* calls, Clock& clock);
  ~RouterRun();

  const std::string& name() const { return name_; }
  router::ClusterView& view() { return view_; }
  router::Router& router() { return router_; }

  // As if the process had died: its clients and its workers are on their own.
  void SetDown() { is_down_ = true; }
  bool is_down() const { return is_down_; }

 private:
  const std::string name_;
  std::atomic<bool> is_down_ = false;
  rpc::MetricsExporter metrics_;
  router::ClusterView view_;
  router::Router router_;
};

// The present run of each router. Thread-safe.
class RouterSet {
 public:
  std::shared_ptr<RouterRun> at(size_t index) const {
    MutexLock lock(mutex_);
    return index < runs_.size() ? runs_[index] : nullptr;
  }
  void Put(size_t index, std::shared_ptr<RouterRun> run) {
    MutexLock lock(mutex_);
    if (runs_.size() <= index) runs_.resize(index + 1);
    runs_[index].swap(run);
  }

 private:
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<RouterRun>> runs_;  // Guarded by mutex_.
};

}  // namespace isthmus::sim
