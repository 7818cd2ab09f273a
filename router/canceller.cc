// SPDX-License-Identifier: Apache-2.0
#include "router/canceller.h"

#include <utility>

#include "router/router_metrics.h"
#include "services/base/log.h"

namespace isthmus::router {
namespace {

constexpr size_t kMaxWaiting = 1024;
constexpr int kNumThreads = 4;
// A prefill worker answers after the step that it is in and the write that it waits for.
constexpr absl::Duration kPatience = absl::Seconds(15);
constexpr absl::Duration kLastPatience = absl::Seconds(1);
constexpr absl::Duration kStopPatience = absl::Seconds(2);
// An idle thread looks this seldom; work wakes it at once.
constexpr absl::Duration kIdleWait = absl::Minutes(1);

}  // namespace

Canceller::Canceller(rpc::MetricsExporter* metrics, std::function<void()> on_done, Clock& clock)
    : metrics_(metrics), on_done_(std::move(on_done)), clock_(clock), jobs_(kMaxWaiting, clock) {
  threads_.reserve(kNumThreads);
  for (int i = 0; i < kNumThreads; ++i) threads_.emplace_back(clock_, [this] { Run(); });
}

Canceller::~Canceller() { Stop(); }

void Canceller::Stop() {
  stops_at_ = absl::ToUnixNanos(clock_.Now() + kStopPatience);
  stops_ = true;
  jobs_.Close();
  threads_.clear();
}

void Canceller::Submit(CancelJob job) {
  ++num_pending_;
  if (jobs_.TryPush(std::move(job))) return;
  Cancel(job);  // NOLINT(bugprone-use-after-move): a refused job is untouched.
}

void Canceller::Run() {
  while (true) {
    const std::optional<CancelJob> job = jobs_.PopFor(kIdleWait);
    if (job.has_value()) {
      Cancel(*job);
    } else if (jobs_.is_closed()) {
      return;
    }
  }
}

absl::Status Canceller::Ask(const CancelJob& job) {
  v1::CancelCall call;
  call.set_transfer_id(job.transfer_id);
  call.set_request_id(job.request_id);
  call.set_reason(job.reason);
  if (job.reply_index.has_value()) call.set_reply_index(*job.reply_index);
  const auto options = [this](const WorkerLink& link) {
    return rpc::CallOptions{stops_ ? kLastPatience : kPatience,
                            [&link] { return !link.Standing().ok(); }};
  };
  absl::Status status;
  if (job.prefill != nullptr) {
    status = job.prefill->client().CancelPrefill(call, options(*job.prefill)).status();
  }
  call.set_writer_is_done(status.ok());
  if (job.decode == nullptr) return status;
  const absl::Status freed = job.decode->client().CancelDecode(call, options(*job.decode)).status();
  return freed.ok() ? status : freed;
}

void Canceller::Cancel(const CancelJob& job) {
  const bool is_late = stops_ && absl::ToUnixNanos(clock_.Now()) > stops_at_;
  const absl::Status status = is_late ? absl::UnavailableError("the router stops") : Ask(job);
  metrics_->Add(kCancels, 1, {status.ok() ? "acknowledged" : "unacknowledged"});
  if (!status.ok()) {
    // The end of our token stream, the lease or the quarantine frees the pages then.
    LogWarning("a cancellation was not acknowledged",
               {{"request_id", job.request_id}, {"status", status.ToString()}});
  }
  --num_pending_;
  on_done_();
}

}  // namespace isthmus::router
