// SPDX-License-Identifier: Apache-2.0
// Metrics as plain data: each process lists its own in one header, so that a test can walk all of
// them. services/rpc exports them. Names: isthmus_<process>_<quantity>_<base unit>[_total].
#pragma once

#include <cstdint>
#include <span>

#include "absl/strings/string_view.h"

namespace isthmus {

enum class MetricKind : uint8_t { kCounter, kGauge, kHistogram };

struct MetricSpec {
  absl::string_view name;
  MetricKind kind = MetricKind::kCounter;
  absl::string_view help;                     // Sentences, with the unit and what is not counted.
  std::span<const absl::string_view> labels;  // Names; bounded in number and in values.
  std::span<const double> buckets;            // Upper bounds of a histogram, ascending.
};

// Seconds, 1 ms to 80 s: times that a client sees.
inline constexpr double kLatencyBuckets[] = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25,
                                             0.5,   1,      2.5,   5,    10,    20,   40,  80};

}  // namespace isthmus
