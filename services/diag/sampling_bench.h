// SPDX-License-Identifier: Apache-2.0
// Where the tokens of a step are drawn: on a GPU beside its logits, or on the host, which brings
// the logits there first. By rows, greedy and with a temperature.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace isthmus::diag {

struct SamplingBenchFlags {
  std::vector<int64_t> rows = {1, 8, 64};
  int64_t vocabulary = 129280;
  std::string device = "cuda:0";
  int threads = 0;  // The host's draws, a row each at a time; 0: one per processor, at most 64.
  int rounds = 12;
};

// Medians in microseconds. Of the host: the copy of the rows ("copy_us") and the draws behind it
// ("draw_us"). Of the trusted path and each patch on the device: the kernel alone ("kernel_us") and
// what an engine waits from its logits to its tokens ("device_us"). Prints itself on the way.
// InvalidArgument names the flag. Internal: a greedy token of the device is not the host's.
absl::StatusOr<nlohmann::ordered_json> RunSamplingBench(const SamplingBenchFlags& flags);

}  // namespace isthmus::diag
