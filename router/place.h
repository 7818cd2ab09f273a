// SPDX-License-Identifier: Apache-2.0
// Which prefill and which decode worker serve a request: a pair that matches, or the reason why
// there is none.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/cluster.pb.h"
#include "router/cluster_view.h"

namespace isthmus::router {

// A pair, with the cards that were compared: calls are made against these runs of the workers.
struct Placement {
  std::shared_ptr<WorkerLink> prefill;
  std::shared_ptr<WorkerLink> decode;
  v1::WorkerCard prefill_card;
  v1::WorkerCard decode_card;
};

// Whether the two may exchange pages. FailedPrecondition names the value that differs, both ways.
absl::Status CheckPair(const v1::WorkerCard& prefill, const v1::WorkerCard& decode);

// The first pair that can be used. Unavailable: a role has no usable worker; the message says what
// each one's problem is. FailedPrecondition: workers are there, but no two of them match.
absl::StatusOr<Placement> Place(const std::vector<std::shared_ptr<WorkerLink>>& links);

// Values of a pair that requests are held against.
v1::ClusterValues ValuesOf(const Placement& placement);

}  // namespace isthmus::router
