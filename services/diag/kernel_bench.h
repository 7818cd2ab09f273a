// SPDX-License-Identifier: Apache-2.0
// One operation at the shapes of V4-Flash on a GPU: a chain of calls on different cold data in one
// graph, L2 flushed before each replay, the trusted path and each patch in interleaved rounds. In
// decode, or with more rows than one a sequence as in prefill.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace isthmus::diag {

struct KernelBenchFlags {
  std::string operation;  // A name of KernelNames, or "all".
  std::string shape = "v4-flash";
  int layers = 8;  // A call of the chain per layer that has the operation.
  int tp = 1;
  int64_t batch = 1;
  int64_t context = 32768;
  int64_t rows = 1;  // New tokens of each sequence.
  std::string arithmetic = "reference";
  std::string experts = "nvfp4";
  std::string index_keys = "default";
  std::string device = "cuda:0";
  int rounds = 3;
  int replays = 12;  // In each round.
  double seconds = 2.0;
  bool has_trusted = true;  // It is slow with many rows.
};

// "attention.csa, attention.hca, …"
std::string KernelNames();

// Prints itself on the way. InvalidArgument names the flag.
absl::StatusOr<nlohmann::ordered_json> RunKernelBench(const KernelBenchFlags& flags);

}  // namespace isthmus::diag
