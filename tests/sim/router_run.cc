// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/router_run.h"

#include <utility>

#include "router/router_metrics.h"

namespace isthmus::sim {

RouterRun::RouterRun(std::string name, const Scenario& scenario, const router::Acceptor* acceptor,
                     rpc::InProcessNetwork* calls, Clock& clock)
    : name_(std::move(name)),
      metrics_("router", router::kAllMetrics),
      view_(
          scenario.router,
          [calls, own = name_](const std::string& address) { return calls->Connect(own, address); },
          clock),
      router_(scenario.router, acceptor, &view_, &metrics_, clock) {}

RouterRun::~RouterRun() {
  view_.Stop();
  router_.Stop();
}

}  // namespace isthmus::sim
