// SPDX-License-Identifier: Apache-2.0
#include "router/route_policy.h"

#include <algorithm>
#include <tuple>

namespace isthmus::router {
namespace {

class RoundRobin : public RoutePolicy {
 public:
  size_t Choose(v1::WorkerRole role, std::span<const LinkLoad> candidates) override {
    // A counter for each role: otherwise a pair of two and two would always be the same pair.
    return (role == v1::WORKER_ROLE_PREFILL ? prefill_turn_ : decode_turn_)++ % candidates.size();
  }

 private:
  size_t prefill_turn_ = 0;
  size_t decode_turn_ = 0;
};

// Less is better, compared from the first member on.
using Cost = std::tuple<bool, double, double>;

Cost PrefillCost(const LinkLoad& load) {
  // A report includes what we placed before it was made; what is in flight bounds it from below.
  const uint64_t tokens =
      std::max(load.reported.pending_prompt_tokens() + load.prompt_tokens_since_report,
               load.prompt_tokens_in_flight);
  const uint64_t calls =
      std::max(load.reported.transfers() + load.requests_since_report, load.requests_in_flight);
  return {false, static_cast<double>(tokens), static_cast<double>(calls)};
}

Cost DecodeCost(const LinkLoad& load) {
  const uint64_t sequences =
      std::max(load.reported.transfers() + load.requests_since_report, load.requests_in_flight);
  const uint64_t slots = std::max<uint64_t>(load.reported.total_state_slots(), 1);
  const bool is_full = load.reported.total_state_slots() > 0 &&
                       (load.reported.free_state_slots() <= load.requests_since_report ||
                        load.reported.free_pages() == 0);
  return {is_full, static_cast<double>(sequences) / static_cast<double>(slots),
          -static_cast<double>(load.reported.free_pages())};
}

class LeastLoaded : public RoutePolicy {
 public:
  size_t Choose(v1::WorkerRole role, std::span<const LinkLoad> candidates) override {
    const auto cost = role == v1::WORKER_ROLE_PREFILL ? PrefillCost : DecodeCost;
    const size_t first = turn_++ % candidates.size();
    size_t best = first;
    for (size_t i = 1; i < candidates.size(); ++i) {
      const size_t other = (first + i) % candidates.size();
      if (cost(candidates[other]) < cost(candidates[best])) best = other;
    }
    return best;
  }

 private:
  size_t turn_ = 0;
};

}  // namespace

std::unique_ptr<RoutePolicy> MakeRoutePolicy(absl::string_view name) {
  if (name == "round_robin") return std::make_unique<RoundRobin>();
  return std::make_unique<LeastLoaded>();
}

}  // namespace isthmus::router
