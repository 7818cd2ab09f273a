// SPDX-License-Identifier: Apache-2.0
// Plays one seed from its first event to its last.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace isthmus::sim {

struct Outcome {
  std::vector<std::string> violations;
  uint64_t trace_hash = 0;
  int64_t num_steps = 0;
  uint64_t num_replies = 0;  // Requests that ended with OK.

  // How often what happened, by name: whether a seed is any good.
  std::map<std::string, uint64_t> counts;
};

// `trace` prints the scenario and every event to stderr.
Outcome Play(uint64_t seed, bool trace);

}  // namespace isthmus::sim
