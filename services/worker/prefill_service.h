// SPDX-License-Identifier: Apache-2.0
// The prefill worker's side of a request: compute the prompt, push its cache into the reserved
// pages as they fill and answer with the handoff. No gRPC type appears here (worker_server.cc has
// them).
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"
#include "services/rpc/metrics_exporter.h"
#include "services/worker/past_transfers.h"
#include "services/worker/prompt_push.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

// What an RPC brings along besides its message.
struct CallScope {
  absl::Time deadline;  // By the worker's clock.
  // Asked every few milliseconds; empty: the caller never leaves without a Cancel.
  std::function<bool()> is_cancelled;
};

class PrefillService {
 public:
  // Both must outlive the service.
  PrefillService(Worker* worker, rpc::MetricsExporter* metrics)
      : worker_(worker), metrics_(metrics) {}

  // Blocks the calling thread, which is the one that pushes, until the pages are acknowledged or
  // given up. Waits its turn while the cache is full, the more urgent first (base/urgency.h).
  //
  // InvalidArgument names the bad field. ResourceExhausted: too many calls wait already, or the
  // cache is too small. Unavailable, scope peer: draining or stopping. Aborted, FailedPrecondition,
  // Unavailable, DeadlineExceeded with scope peer: the transfer (kvtransfer/sender.h). Aborted with
  // scope request: the same transfer runs, or has ended here, or its lease is over. Cancelled: by
  // Cancel or by the caller.
  absl::StatusOr<v1::PrefillReply> Prefill(const v1::PrefillCall& call, const CallScope& scope);

  // Ends the call of that transfer and returns when its pages are free here and no write of it can
  // land; a call that comes later than its Cancel is refused.
  //
  // DeadlineExceeded: not within `timeout`. Unavailable: a write of it was given up and may still
  // land, so that the reserved pages must stay in quarantine.
  absl::StatusOr<v1::CancelReply> Cancel(const v1::CancelCall& call, absl::Duration timeout);

  // Refuses calls from now on; those that run go on.
  void Drain();

  // Calls that have not been answered: while there are any, a peer counts on pages of this worker.
  int64_t num_calls() const;

  // Returns when there are none, or after `patience`: the number that is left.
  int64_t AwaitIdle(absl::Duration patience);

  // Adds what the service knows to the load.
  void AddLoad(v1::WorkerLoad* load) const;

 private:
  struct Call;

  absl::StatusOr<v1::PrefillReply> Attempt(const v1::PrefillCall& call, const CallScope& scope);
  absl::Status CheckCall(const v1::PrefillCall& call) const;
  absl::StatusOr<std::shared_ptr<Call>> Register(const v1::PrefillCall& call,
                                                 const CallScope& scope);
  absl::StatusOr<v1::PrefillReply> Run(const v1::PrefillCall& call, Call& state);
  absl::StatusOr<engine::Sequence> AdmitInTurn(const v1::PrefillCall& call, Call& state);
  absl::Status Submit(engine::Sequence sequence, Call& state);
  absl::StatusOr<engine::Sequence> PushWhileComputing(Call& state, PromptPush& push);
  absl::Status CheckStillWanted(const Call& state) const;
  absl::Time PushDeadline(const Call& state) const;
  void Report(const v1::PrefillCall& call, const PromptPush& push, const v1::KvHandoff& handoff);

  Worker* const worker_;
  rpc::MetricsExporter* const metrics_;
  mutable Mutex mutex_;
  CondVar changed_;                                     // A call ended, waits, or is cancelled.
  std::map<std::string, std::shared_ptr<Call>> calls_;  // Guarded by mutex_, as all below.
  std::deque<const Call*> waiting_;  // For room in the cache, the most urgent first.
  PastTransfers past_;
  uint64_t num_ended_ = 0;  // Calls, since the start.
  bool is_draining_ = false;
};

}  // namespace isthmus::worker
