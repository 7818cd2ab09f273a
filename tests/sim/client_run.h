// SPDX-License-Identifier: Apache-2.0
// One client: asks, reads, perhaps leaves, and judges what it got.
#pragma once

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "services/base/clock.h"
#include "tests/sim/journal.h"
#include "tests/sim/router_run.h"
#include "tests/sim/scenario.h"

namespace isthmus::sim {

// What a request may end with besides OK.
struct Excuses {
  // Faults happen: UNAVAILABLE, ABORTED, DATA_LOSS.
  bool for_faults = false;

  // There may be no place or no room: RESOURCE_EXHAUSTED.
  bool for_load = false;

  // The longest that a request may take when nobody leaves.
  absl::Duration patience = absl::Seconds(70);
};

// Runs one request and returns how it ended. Violations: tokens that differ from the script's, an
// event after the end or none at the end, an error without excuse, no end in time.
absl::Status RunClient(const std::string& name, const ClientPlan& plan, const Scenario& scenario,
                       const Excuses& excuses, RouterRun& router, Clock& clock, Journal& journal);

}  // namespace isthmus::sim
