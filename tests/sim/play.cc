// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/play.h"

#include <unistd.h>

#include "services/rpc/identity.h"
#include "tests/sim/cluster.h"
#include "tests/sim/scenario.h"
#include "tests/sim/simulated_world.h"
#include "tests/sim/tiny_acceptor.h"

namespace isthmus::sim {
namespace {

WorldOptions WorldOf(uint64_t seed, bool trace) {
  RandomSource random(seed * 0x94d049bb133111eb + 3);
  WorldOptions options;
  options.seed = seed;
  options.trace = trace;
  options.lock_yield_share = random.Chance(0.25) ? 0.0 : random.Chance(0.5) ? 0.02 : 0.2;
  options.stall_share = random.Chance(0.5) ? 0.0 : 0.002;
  return options;
}

}  // namespace

Outcome Play(uint64_t seed, bool trace) {
  const router::Acceptor& acceptor = TinyAcceptor();
  const Scenario scenario = DrawScenario(seed);
  if (trace) {
    const std::string text = Describe(scenario);
    [[maybe_unused]] const auto written = write(STDERR_FILENO, text.data(), text.size());
  }
  Outcome outcome;
  SimulatedWorld world(WorldOf(seed, trace));
  RandomSource identities(seed * 0xbf58476d1ce4e5b9 + 5);
  rpc::SetIdentitySource([&identities] { return identities.Bits(); });
  world.Run([&] {
    Journal journal([&world](absl::string_view event) { world.Note(event); });
    Cluster cluster(scenario, &acceptor, world, &journal);
    world.CheckEachStep([&cluster] { cluster.watch().CheckPools(); });
    cluster.Start();
    cluster.Play();
    cluster.Settle();
    world.CheckEachStep({});
    outcome.violations = journal.violations();
    outcome.num_replies = cluster.num_replies();
    outcome.counts = journal.counts();
  });
  rpc::SetIdentitySource({});
  outcome.trace_hash = world.trace_hash();
  outcome.num_steps = world.num_steps();
  return outcome;
}

}  // namespace isthmus::sim
