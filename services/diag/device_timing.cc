// SPDX-License-Identifier: Apache-2.0
#include "services/diag/device_timing.h"

#include <algorithm>
#include <utility>

#include "kernels/random_fill/random_fill.h"
#include "services/base/status_macros.h"

namespace isthmus::diag {
namespace {

constexpr int64_t kFlushBytes = int64_t{160} << 20;

}  // namespace

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

absl::StatusOr<CacheFlush> CacheFlush::Create() {
  // The emulator has no cache, and no time.
  const int64_t bytes = kernels::IsRealDevice() ? kFlushBytes : 4096;
  CacheFlush flush;
  ISTHMUS_ASSIGN_OR_RETURN(flush.written_, kernels::DeviceBuffer::Allocate(bytes));
  ISTHMUS_ASSIGN_OR_RETURN(flush.read_, kernels::DeviceBuffer::Allocate(bytes));
  ISTHMUS_ASSIGN_OR_RETURN(flush.sink_, kernels::DeviceBuffer::Allocate(4));
  ISTHMUS_RETURN_IF_ERROR(kernels::FillDevice(flush.read_.data(), 0, bytes, nullptr));
  ISTHMUS_RETURN_IF_ERROR(kernels::DeviceStream().Synchronise());
  return flush;
}

absl::Status CacheFlush::Enqueue(const kernels::Exec& exec) const {
  ISTHMUS_RETURN_IF_ERROR(kernels::FillDevice(written_.data(), 1, written_.bytes(), exec.stream));
  return kernels::ReadThrough(read_.data(), read_.bytes(), sink_.as<uint32_t>(), exec);
}

absl::StatusOr<kernels::DeviceGraph> CaptureGraph(const std::function<absl::Status()>& work,
                                                  const kernels::DeviceStream& stream) {
  ISTHMUS_RETURN_IF_ERROR(work());
  ISTHMUS_RETURN_IF_ERROR(stream.Synchronise());
  ISTHMUS_RETURN_IF_ERROR(kernels::DeviceGraph::BeginCapture(stream.get()));
  const absl::Status captured = work();
  absl::StatusOr<kernels::DeviceGraph> graph = kernels::DeviceGraph::EndCapture(stream.get());
  ISTHMUS_RETURN_IF_ERROR(captured);
  return graph;
}

absl::StatusOr<double> TimeReplay(const kernels::DeviceGraph& graph, const kernels::Exec& exec,
                                  const kernels::DeviceStream& stream) {
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::DeviceEvent start, kernels::DeviceEvent::Create());
  ISTHMUS_ASSIGN_OR_RETURN(const kernels::DeviceEvent end, kernels::DeviceEvent::Create());
  ISTHMUS_RETURN_IF_ERROR(start.Record(exec.stream));
  ISTHMUS_RETURN_IF_ERROR(graph.Replay(exec.stream));
  ISTHMUS_RETURN_IF_ERROR(end.Record(exec.stream));
  ISTHMUS_RETURN_IF_ERROR(stream.Synchronise());
  return end.MillisecondsSince(start);
}

absl::StatusOr<std::vector<double>> TimeReplays(const kernels::DeviceGraph& graph,
                                                const kernels::Exec& exec,
                                                const kernels::DeviceStream& stream,
                                                const CacheFlush* flush, int replays,
                                                double seconds) {
  std::vector<double> times;
  double spent = 0.0;
  for (int r = 0; r <= replays; ++r) {
    if (flush != nullptr) ISTHMUS_RETURN_IF_ERROR(flush->Enqueue(exec));
    ISTHMUS_ASSIGN_OR_RETURN(const double time, TimeReplay(graph, exec, stream));
    spent += time;
    if (r > 0) times.push_back(time);  // The first replay uploads the graph.
    if (times.size() >= 3 && spent > seconds * 1e3) break;
  }
  return times;
}

}  // namespace isthmus::diag
