// SPDX-License-Identifier: Apache-2.0
// Speed through a router, as its clients see it. Built only with gRPC.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace isthmus::diag {

struct ClusterBenchFlags {
  std::string server = "127.0.0.1:7100";
  int64_t context = 1;  // Prompt tokens; random ids below `vocab_size`, from a fixed seed.
  int64_t vocab_size = 512;
  int64_t decode = 64;    // Output tokens after the first.
  int64_t requests = 50;  // After five that are not measured.
  int64_t concurrency = 1;
  double temperature = 0.0;

  // The prefill worker's log: with it the time from its last write's posting to the first token
  // here is measured. Both clocks must be of one machine. Empty: no such figure.
  std::string prefill_log;
};

// Runs the requests. The record has, in milliseconds, the time to the first token and the
// hand-over (p50, p99), and tokens per second: decoded by one request (median, and the mean over
// all tokens; of the requests that had at least half of `decode` tokens), and put out by all.
absl::StatusOr<nlohmann::ordered_json> RunClusterBench(const ClusterBenchFlags& flags);

}  // namespace isthmus::diag
