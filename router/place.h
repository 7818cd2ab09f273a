// SPDX-License-Identifier: Apache-2.0
// Which prefill and which decode worker serve a request: a pair that matches, or the reason why
// there is none.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "proto/cluster.pb.h"
#include "router/route_policy.h"
#include "router/worker_link.h"
#include "services/base/mutex.h"

namespace isthmus::router {

// A pair, with the request on the books of both.
struct Placement {
  std::shared_ptr<WorkerLink> prefill;
  std::shared_ptr<WorkerLink> decode;
  Charge prefill_charge;
  Charge decode_charge;
};

struct PlaceWish {
  uint64_t num_prompt_tokens = 0;
  uint64_t max_output_tokens = 0;

  // Incarnations on which this request has failed: taken only when there is nobody else.
  std::set<uint64_t> failed;

  // Incarnations that have no room now: not taken.
  std::set<uint64_t> full;

  // When all decode workers were full, one of them is asked to let others give way, and not all of
  // them for the same request: the one that said that they will, 0 for none.
  bool may_ask = false;
  uint64_t asked_at = 0;
  uint64_t ask_id = 0;
  bool is_prefill_full = false;  // One of `full` is a prefill worker.
};

using Links = std::vector<std::shared_ptr<WorkerLink>>;

// The statuses of all workers that are known, for saying why none of them will do.
using Problems = absl::FunctionRef<std::vector<v1::WorkerStatus>()>;

// Whether two workers may be in one cluster. FailedPrecondition (scope peer) names the value that
// differs, both ways. Sizes of caches may differ.
absl::Status CheckMatch(const v1::WorkerCard& a, absl::string_view whose_a, const v1::WorkerCard& b,
                        absl::string_view whose_b);

// The values that requests are held against: those of a ready pair that matches, with the most
// tokens that any such pair has room for. Errors are Placer::Place's.
absl::StatusOr<v1::ClusterValues> ValuesOf(const Links& links, Problems problems);

// Thread-safe.
class Placer {
 public:
  explicit Placer(absl::string_view policy) : policy_(MakeRoutePolicy(policy)) {}

  // The decode worker first, then a prefill worker that matches it. Unavailable (scope peer): a
  // role has no usable worker; the message has their problems. FailedPrecondition:
  // workers are there, but no two of them match. ResourceExhausted: all that could serve are in
  // `wish.full`.
  absl::StatusOr<Placement> Place(const Links& links, Problems problems, const PlaceWish& wish);

 private:
  std::shared_ptr<WorkerLink> ChooseLocked(v1::WorkerRole role, const Links& candidates,
                                           const PlaceWish& wish);

  Mutex mutex_;
  const std::unique_ptr<RoutePolicy> policy_;  // Guarded by mutex_.
};

}  // namespace isthmus::router
