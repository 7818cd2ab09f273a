// SPDX-License-Identifier: Apache-2.0
// One decode step of a model at its full size on a GPU, with random weights and caches: how long it
// takes, what it reads, and where the time goes.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace isthmus::diag {

struct StepBenchFlags {
  std::string shape = "v4-flash";  // Or "miniature", which the emulator can run.
  int layers = 43;
  int tp = 1;                  // Ranks, each on a device of its own where there are as many.
  bool is_rank_alone = false;  // One rank's share without communication.
  int64_t batch = 1;
  int64_t context = 4096;
  std::string arithmetic = "reference";
  std::string experts = "nvfp4";       // Or mxfp4.
  std::string index_keys = "default";  // As ParseIndexKeyFormat.
  std::string device = "cuda:0";
  int replays = 30;
  double seconds = 8.0;  // At most so long for the replays of one patch set, but three replays.
  bool batch_invariant = false;
  bool has_operations = true;  // Times operations as well.
  bool is_ladder = false;      // From all patches off to all on, one by one.
  std::map<std::string, bool> patches;
};

// The record of a run, as it is written to --json; prints itself on the way. InvalidArgument names
// the flag. ResourceExhausted: the device has no room for these layers and this context.
absl::StatusOr<nlohmann::ordered_json> RunStepBench(const StepBenchFlags& flags);

}  // namespace isthmus::diag
