// SPDX-License-Identifier: Apache-2.0
// The simulated cluster with the machine's clock and real threads, all at once: what a simulation
// cannot see, such as an access without a lock, ThreadSanitizer sees here.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "services/base/log.h"
#include "services/base/thread.h"
#include "tests/sim/cluster.h"
#include "tests/sim/scenario.h"
#include "tests/sim/tiny_acceptor.h"

namespace isthmus::sim {
namespace {

// As of a seed, but with a crowd of clients within two seconds, and with patience for a machine
// that is busy: no time here is exact.
Scenario CrowdOf(uint64_t seed, std::vector<Misfortune> misfortunes) {
  Scenario scenario = DrawScenario(seed);
  Scenario crowd = DrawScenario(seed + 5);
  scenario.num_routers = 2;
  scenario.num_prefill = 2;
  scenario.num_decode = 2;
  scenario.script.step_time = absl::Milliseconds(2);
  scenario.script.prefill_token_time = absl::Microseconds(20);
  scenario.worker.cache_tokens = 1024;
  scenario.worker.reservation_lease = absl::Seconds(2);
  scenario.worker.quarantine_time += absl::Seconds(1);
  scenario.router.max_behind_messages = 2048;
  scenario.router.max_active_requests = 8;
  scenario.router.max_queued_requests = 64;
  scenario.misfortunes = std::move(misfortunes);
  for (const ClientPlan& client : crowd.clients) scenario.clients.push_back(client);
  for (size_t i = 0; i < scenario.clients.size(); ++i) {
    ClientPlan& client = scenario.clients[i];
    client.arrives_at *= 0.4;
    client.read_pause = std::min(client.read_pause, absl::Milliseconds(5));
    LimitReplies(scenario.worker, &client);
    // In prefill, at the handoff, in decode.
    if (i % 3 == 0) client.leaves_after = absl::Milliseconds(2 + 3 * static_cast<int64_t>(i));
  }
  return scenario;
}

void PlayWithThreads(const Scenario& scenario) {
  SetUpLog("threads_test", LogLevel::kError);
  Journal journal({});
  {
    Cluster cluster(scenario, &TinyAcceptor(), RealClock(), &journal);
    std::atomic<bool> ends = false;
    Thread checker(RealClock(), [&] {
      while (!ends) {
        cluster.watch().CheckPools();
        RealClock().Sleep(absl::Milliseconds(2));
      }
    });
    cluster.Start();
    cluster.Play();
    cluster.Settle();
    ends = true;
    EXPECT_GT(cluster.num_replies(), 0);
  }
  for (const std::string& violation : journal.violations()) ADD_FAILURE() << violation;
  for (const auto& [what, count] : journal.counts()) printf("%6lu  %s\n", count, what.c_str());
}

Misfortune At(absl::Duration at, MisfortuneKind kind, int worker, absl::Duration lasts) {
  Misfortune misfortune;
  misfortune.at = at;
  misfortune.kind = kind;
  misfortune.worker = worker;
  misfortune.lasts = lasts;
  return misfortune;
}

TEST(ThreadsTest, ACrowdIsServedWhileClientsLeave) { PlayWithThreads(CrowdOf(5, {})); }

TEST(ThreadsTest, WorkersDieDrainAndComeBackUnderLoad) {
  PlayWithThreads(CrowdOf(
      15, {At(absl::Milliseconds(400), MisfortuneKind::kKill, 0, absl::Milliseconds(200)),
           At(absl::Milliseconds(700), MisfortuneKind::kKill, 2, absl::Milliseconds(200)),
           At(absl::Milliseconds(1100), MisfortuneKind::kDrain, 3, absl::Milliseconds(100)),
           At(absl::Milliseconds(1300), MisfortuneKind::kLoseRegistration, 1, {}),
           At(absl::Milliseconds(1500), MisfortuneKind::kDrain, 0, absl::Milliseconds(100))}));
}

TEST(ThreadsTest, ConnectionsBreakAndRoutersRestartUnderLoad) {
  PlayWithThreads(CrowdOf(
      25, {At(absl::Milliseconds(300), MisfortuneKind::kResetCalls, 2, absl::Milliseconds(200)),
           At(absl::Milliseconds(500), MisfortuneKind::kSilentCalls, 0, absl::Milliseconds(300)),
           At(absl::Milliseconds(900), MisfortuneKind::kRestartRouter, 0, absl::Milliseconds(500)),
           At(absl::Milliseconds(1200), MisfortuneKind::kResetPages, 3, absl::Milliseconds(200)),
           At(absl::Milliseconds(1500), MisfortuneKind::kPowerOff, 1, absl::Milliseconds(300))}));
}

}  // namespace
}  // namespace isthmus::sim
