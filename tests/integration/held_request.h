// SPDX-License-Identifier: Apache-2.0
// One request on a pair of workers with the scripted model, brought to a phase of its life and kept
// there: long enough to break something, by slow steps and by stopping processes (SIGSTOP).
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "tests/integration/cluster.h"
#include "tests/integration/running_request.h"

namespace isthmus::testing {

enum class Phase : uint8_t {
  kQueued,    // In the router, behind another request.
  kPrefill,   // Computing its prompt.
  kTransfer,  // Computed; its pages are being written. The decode worker is stopped.
  kHandover,  // Written; the decode worker, which is stopped, has been told.
  kDecode,    // Has streamed some tokens.
};
const char* PhaseName(Phase phase);
void PrintTo(Phase phase, std::ostream* out);
void PrintTo(Role role, std::ostream* out);

// A pair whose steps are slow, whose leases, timeouts and quarantines are short, and whose router
// works on one request at a time.
ClusterOptions ScriptedPair();

// The longest that pages can stay taken in it: a lease, a quarantine, and patience.
inline constexpr absl::Duration kFreePatience = absl::Seconds(20);
// When everybody lives, cancellations are acknowledged and nothing waits for a lease.
inline constexpr absl::Duration kAcknowledgedPatience = absl::Seconds(3);

// What the scripted model of ScriptedPair answers, with `max_tokens_per_step`.
std::vector<uint32_t> ScriptedTokens(const v1::GenerateRequest& request,
                                     int32_t max_tokens_per_step = 1);

// Whether the cluster answers a request as it should.
::testing::AssertionResult Serves(Cluster& cluster);

class HeldRequest {
 public:
  HeldRequest(Cluster* cluster, Phase phase);
  ~HeldRequest() { Release(); }

  // Whether the phase was reached.
  const ::testing::AssertionResult& is_held() const { return is_held_; }

  // Lets stopped processes go on.
  void Release();

  RunningRequest& request() { return *request_; }

  // Whether what was streamed is the beginning of the right reply; all of it when the reply is OK.
  ::testing::AssertionResult HasRightTokens();

  // The one before it, when queued; null otherwise.
  RunningRequest* blocker() { return blocker_.get(); }

 private:
  bool Reach(Phase phase);
  bool ReachHandover();

  Cluster* const cluster_;
  const v1::GenerateRequest asked_;
  std::unique_ptr<RunningRequest> blocker_;
  std::unique_ptr<RunningRequest> request_;
  std::vector<Member*> stopped_;
  ::testing::AssertionResult is_held_;
};

}  // namespace isthmus::testing
