// SPDX-License-Identifier: Apache-2.0
// How a worker is chosen among those that could serve a request: one of the project's six
// interfaces.
#pragma once

#include <memory>
#include <span>

#include "absl/strings/string_view.h"
#include "proto/cluster.pb.h"
#include "router/worker_link.h"

namespace isthmus::router {

class RoutePolicy {
 public:
  virtual ~RoutePolicy() = default;

  // An index into `candidates`, which are not empty and all have `role`. Called by one thread at a
  // time; what it chooses is charged before the next call.
  virtual size_t Choose(v1::WorkerRole role, std::span<const LinkLoad> candidates) = 0;
};

// "round_robin": in turn, whatever the loads are.
// "least_loaded": prefill by prompt tokens that wait; decode by the share of state slots in use,
// then by free pages, and never one without room while another has some. Ties take turns.
std::unique_ptr<RoutePolicy> MakeRoutePolicy(absl::string_view name);

}  // namespace isthmus::router
