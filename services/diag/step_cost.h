// SPDX-License-Identifier: Apache-2.0
// What a decode step must read at least, from the weights, the caches and the experts that its
// tokens really choose: the floor that measured times are held against.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "services/diag/random_model.h"

namespace isthmus::diag {

// Measured on an H200: bulk copies of 8 GB (bytes per second).
inline constexpr double kReadRate = 4.6e12;

struct StepCost {
  std::vector<int64_t> touched_experts;  // Per layer, routed ones.
  int64_t routed_bytes = 0;
  int64_t other_weight_bytes = 0;  // Attention, shared experts, gate, mixes, head.
  int64_t cache_bytes = 0;         // Entries, windows and index keys that are read.

  int64_t bytes() const { return routed_bytes + other_weight_bytes + cache_bytes; }
  double floor_ms() const { return static_cast<double>(bytes()) / kReadRate * 1e3; }
};

// Runs the step once, with a tap that sees which experts are chosen.
absl::StatusOr<StepCost> CostOf(const RandomModel& model, const PatchSet& patches);

// Bytes of a matrix and its scales as the device holds them.
int64_t StoredBytes(const kernels::WeightView& w);

}  // namespace isthmus::diag
