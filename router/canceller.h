// SPDX-License-Identifier: Apache-2.0
// Gives back what a request took on its workers when it ended early, after its client has been
// answered: the prefill worker first, so that nothing writes any more, then the decode worker,
// whose pages may then be used again at once. Both acknowledge.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "router/worker_link.h"
#include "services/base/clock.h"
#include "services/base/queue.h"
#include "services/base/thread.h"
#include "services/rpc/metrics_exporter.h"

namespace isthmus::router {

// What one transfer may still hold.
struct CancelJob {
  std::string transfer_id;
  std::string request_id;
  std::string reason;

  // Null when it was never asked to write, or has said that it is done.
  std::shared_ptr<WorkerLink> prefill;
  std::shared_ptr<WorkerLink> decode;

  // Of several replies that one alone, at the decode worker; nothing: all.
  std::optional<uint32_t> reply_index = {};
};

class Canceller {
 public:
  // `on_done` is called after each job, without a lock. Both must outlive the canceller.
  Canceller(rpc::MetricsExporter* metrics, std::function<void()> on_done, Clock& clock);
  ~Canceller();

  // Runs the job in the background; in this thread when too many wait already.
  void Submit(CancelJob job);

  // Jobs that are not done yet.
  int64_t num_pending() const { return num_pending_; }

  // Ends the threads. What still waits is asked for with little patience, and for two seconds in
  // all; the rest is left to leases and to the end of the token streams.
  void Stop();

 private:
  void Run();
  void Cancel(const CancelJob& job);
  absl::Status Ask(const CancelJob& job);

  rpc::MetricsExporter* const metrics_;
  const std::function<void()> on_done_;
  Clock& clock_;
  BoundedQueue<CancelJob> jobs_;
  std::atomic<int64_t> num_pending_ = 0;
  std::atomic<bool> stops_ = false;
  std::atomic<int64_t> stops_at_ = 0;  // When to leave the rest, in nanoseconds since the epoch.
  std::vector<Thread> threads_;
};

}  // namespace isthmus::router
