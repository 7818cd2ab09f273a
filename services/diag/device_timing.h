// SPDX-License-Identifier: Apache-2.0
// Timing work on a GPU: replays of a captured graph, with caches flushed before each when the work
// itself would find them warm; events stand around the replay alone.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/device.h"
#include "kernels/core/exec.h"

namespace isthmus::diag {

double MedianOf(std::vector<double> values);

// Writes, then reads, more than the L2 cache holds, so that what follows finds it cold and clean.
class CacheFlush {
 public:
  static absl::StatusOr<CacheFlush> Create();
  absl::Status Enqueue(const kernels::Exec& exec) const;

 private:
  kernels::DeviceBuffer written_;
  kernels::DeviceBuffer read_;
  kernels::DeviceBuffer sink_;
};

// `work` once as it is (scratch grows), then captured.
absl::StatusOr<kernels::DeviceGraph> CaptureGraph(const std::function<absl::Status()>& work,
                                                  const kernels::DeviceStream& stream);

// Milliseconds of one replay.
absl::StatusOr<double> TimeReplay(const kernels::DeviceGraph& graph, const kernels::Exec& exec,
                                  const kernels::DeviceStream& stream);

// Milliseconds of every replay: `replays` of them, or as many as fit into `seconds`, but three.
// `flush` may be null.
absl::StatusOr<std::vector<double>> TimeReplays(const kernels::DeviceGraph& graph,
                                                const kernels::Exec& exec,
                                                const kernels::DeviceStream& stream,
                                                const CacheFlush* flush, int replays,
                                                double seconds);

}  // namespace isthmus::diag
