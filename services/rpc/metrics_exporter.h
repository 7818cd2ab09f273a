// SPDX-License-Identifier: Apache-2.0
// The metrics of a process, kept by prometheus-cpp behind MetricSpec and served at /metrics.
#pragma once

#include <initializer_list>
#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/base/metrics.h"

namespace isthmus::rpc {

// Thread-safe. Metrics without labels exist from the start with the value 0, so that rates and
// absence alerts work; `labels` are values in the order of MetricSpec::labels.
class MetricsExporter {
 public:
  // `process` is the label of the build_info metric, which every process has.
  MetricsExporter(absl::string_view process, std::span<const MetricSpec* const> specs);
  ~MetricsExporter();

  // Counters and gauges of `specs`. A spec that was not given to the constructor ends the process.
  void Add(const MetricSpec& spec, double value, std::initializer_list<std::string> labels = {});
  void Set(const MetricSpec& spec, double value, std::initializer_list<std::string> labels = {});
  void Observe(const MetricSpec& spec, double value,
               std::initializer_list<std::string> labels = {});

  // Serves GET /metrics on "host:port" (0: a free port) and returns the real address.
  // Unavailable: the address is taken.
  absl::StatusOr<std::string> Listen(const std::string& address);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace isthmus::rpc
