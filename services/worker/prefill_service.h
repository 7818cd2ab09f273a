// SPDX-License-Identifier: Apache-2.0
// The prefill worker's side of a request: compute the prompt, push its cache into the reserved
// pages and answer with the handoff. No gRPC type appears here (worker_server.cc has them).
#pragma once

#include <functional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"
#include "services/rpc/metrics_exporter.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

// What an RPC brings along besides its message.
struct CallScope {
  absl::Time deadline;
  std::function<bool()> is_cancelled;
};

class PrefillService {
 public:
  // Both must outlive the service.
  PrefillService(Worker* worker, rpc::MetricsExporter* metrics)
      : worker_(worker), metrics_(metrics) {}

  // Blocks the calling thread until the pages are acknowledged or given up. InvalidArgument names
  // the bad field. ResourceExhausted: no room in the cache or the inbox. Aborted,
  // FailedPrecondition, Unavailable, DeadlineExceeded with scope peer: the transfer (sender.h).
  // Aborted with scope request: the reservation's lease ended before the prompt was computed.
  // Cancelled: the caller left.
  absl::StatusOr<v1::KvHandoff> Prefill(const v1::PrefillCall& call, const CallScope& scope);

 private:
  absl::StatusOr<engine::Sequence> Compute(engine::Sequence sequence, const CallScope& scope);
  absl::StatusOr<v1::KvHandoff> PushPages(const v1::PrefillCall& call,
                                          const engine::Sequence& sequence, absl::Time deadline);

  Worker* const worker_;
  rpc::MetricsExporter* const metrics_;
};

}  // namespace isthmus::worker
