// SPDX-License-Identifier: Apache-2.0
// The all-reduce of a tensor-parallel group over GPUs, a thread and a device per rank: its patch
// against NCCL (or, without it, plain kernels over peer memory), by size, in interleaved rounds.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/status/statusor.h"

namespace isthmus::diag {

struct AllReduceBenchFlags {
  int ranks = 2;
  // Rows of `hidden` numbers, as a decode step of so many sequences sends them.
  std::vector<int64_t> rows = {1, 8, 64};
  int64_t hidden = 4096;
  int calls = 50;  // In one graph.
  int rounds = 3;
  int replays = 12;  // In each round.
};

// Prints itself on the way. NotFound: fewer GPUs than ranks.
absl::StatusOr<nlohmann::ordered_json> RunAllReduceBench(const AllReduceBenchFlags& flags);

}  // namespace isthmus::diag
