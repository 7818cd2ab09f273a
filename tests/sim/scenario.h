// SPDX-License-Identifier: Apache-2.0
// What one seed plays: the sizes of a cluster, its clients and its misfortunes, all drawn before
// the first thread runs, so that they can be printed and are the same at every replay.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "router/router_config.h"
#include "services/base/urgency.h"
#include "services/model/scripted_forward.h"
#include "services/worker/worker_config.h"
#include "tests/sim/random_source.h"

namespace isthmus::sim {

// One request and how its client behaves.
struct ClientPlan {
  absl::Duration arrives_at;
  std::vector<int32_t> prompt;
  std::string cache_salt;
  int64_t max_output_tokens = 1;
  Priority priority = Priority::kNormal;
  uint32_t num_replies = 1;
  // The script's token of that number is a stop token; negative, or behind its end: none is.
  int64_t stops_at = -1;

  // Leaves so long after it came; infinite: stays.
  absl::Duration leaves_after = absl::InfiniteDuration();
  // The same as a deadline that it tells the router.
  absl::Duration deadline = absl::InfiniteDuration();
  // Between two reads.
  absl::Duration read_pause;
};

enum class MisfortuneKind : uint8_t {
  kKill,         // A worker dies; another run of it comes back at the same address.
  kPowerOff,     // The same, but nobody hears of it before the keepalive is over.
  kDrain,        // An operator drains a worker through the router; then it is restarted.
  kResetCalls,   // Connections between a router and a worker break.
  kSilentCalls,  // They fall silent for a while.
  kResetPages,   // A worker's transport is cut off; calls still work.
  kSilentPages,
  kLoseRegistration,  // A worker's registration streams end and come back.
  kRestartRouter,
  kDrainRouter,  // It takes no more requests, finishes those it has and is restarted.
};

absl::string_view MisfortuneName(MisfortuneKind kind);

struct Misfortune {
  absl::Duration at;
  MisfortuneKind kind = MisfortuneKind::kKill;
  int worker = 0;  // Among all workers, prefill ones first.
  int router = 0;
  absl::Duration lasts;
};

// Shares of messages and page writes that meet with something.
struct Weather {
  absl::Duration longest_latency;
  double slow_share = 0;  // Take up to slow_latency instead.
  absl::Duration slow_latency;
  double break_share = 0;
  double repeat_share = 0;

  absl::Duration longest_write;
  double slow_write_share = 0;  // May land after their writer has given up.
  double lost_write_share = 0;
  double failed_write_share = 0;
  double corrupt_write_share = 0;

  bool is_fair() const {
    return break_share + lost_write_share + failed_write_share + corrupt_write_share +
               slow_write_share ==
           0;
  }
};

struct Scenario {
  uint64_t seed = 0;
  int num_routers = 1;
  int num_prefill = 1;
  int num_decode = 1;
  model::ScriptedOptions script;
  worker::WorkerConfig worker;
  router::RouterConfig router;
  Weather weather;
  std::vector<ClientPlan> clients;
  std::vector<Misfortune> misfortunes;
  // More than its decode worker has room for.
  bool is_pressed = false;
  // All misfortunes are maintenance that nobody may notice.
  bool is_planned = false;

  // Whether every patient client is owed its reply.
  bool is_fair() const {
    return (misfortunes.empty() || is_planned) && weather.is_fair() &&
           worker.reservation_lease >= absl::Seconds(1) &&
           script.step_time < absl::Milliseconds(100);
  }

  // If every request ran alone, after all others, with whatever latencies: a patient client of a
  // fair cluster waits no longer, or it starves. Times two, since what was preempted is computed
  // again.
  absl::Duration LongestWait() const;

  static constexpr absl::Duration kRequestTimeout = absl::Seconds(60);

  // What the quarantine is built on: a message is at most so old when it arrives (its latency and
  // the longest silence that a connection survives), and a page write lands at most so long after
  // its deadline.
  static constexpr absl::Duration kLongestLatency = absl::Milliseconds(400);
  static constexpr absl::Duration kKeepalive = absl::Seconds(1);
  static constexpr absl::Duration kLongestDelay = absl::Milliseconds(1400);
  static constexpr absl::Duration kLongestLateness = absl::Milliseconds(300);
};

// All replies of a client fit into an empty cache: a worker refuses what never fits.
void LimitReplies(const worker::WorkerConfig& config, ClientPlan* plan);

Scenario DrawScenario(uint64_t seed);

// One line for each thing that will happen.
std::string Describe(const Scenario& scenario);

}  // namespace isthmus::sim
