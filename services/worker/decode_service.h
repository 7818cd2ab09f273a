// SPDX-License-Identifier: Apache-2.0
// The decode worker's side of a request: set pages aside, verify what arrived in them, run the
// sequence, give everything back. No gRPC type appears here (worker_server.cc has them).
//
// A transfer is reserved, then admitting (its handoff is being verified), then running, then gone.
// Cancellation, the end of its router's stream and, while reserved, its lease end it early.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"
#include "services/rpc/metrics_exporter.h"
#include "services/worker/token_streams.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

class DecodeService {
 public:
  // Both must outlive the service, and the worker's loop must be stopped before the service dies.
  DecodeService(Worker* worker, rpc::MetricsExporter* metrics)
      : worker_(worker), metrics_(metrics) {}

  // The same reservation for the same transfer id. InvalidArgument: no prompt, more tokens than a
  // sequence may have. ResourceExhausted: no pages or no state slot. FailedPrecondition: the router
  // has no token stream here. Unavailable: draining.
  absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call);

  // Verifies and admits. Aborted: the reservation is gone, or of another run. DataLoss names the
  // page group whose digest differs. ResourceExhausted: the inbox is full. After an error the
  // transfer is gone.
  absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call);

  // Returns when the pages are given back or in quarantine. DeadlineExceeded: the step that the
  // sequence is in takes longer than `timeout`.
  absl::StatusOr<v1::CancelReply> Cancel(const v1::CancelCall& call, absl::Duration timeout);

  // Refuses reservations from now on.
  v1::DrainReply Drain();

  // The queue that a router's stream reads. Aborted: the hello is for another run of this worker.
  absl::StatusOr<std::shared_ptr<TokenQueue>> OpenStream(const v1::TokensHello& hello);

  // Ends the router's transfers as well.
  void CloseStream(uint64_t router_incarnation);

  // Ends all streams, which unblocks the threads that write them.
  void Stop() { streams_.CloseAll(); }

  // Takes back expired reservations and frees pages whose quarantine is over. Called every few
  // hundred milliseconds.
  void Sweep();

  // Reserved, admitting and running.
  int64_t num_transfers() const;

 private:
  struct Transfer {
    enum class State : uint8_t { kReserved, kAdmitting, kRunning };
    State state = State::kReserved;
    v1::ReserveCall call;
    v1::KvReservation reservation;
    kv::SequenceCache cache;  // Empty once running.
    absl::Time expires;
    uint64_t digests_verified = 0;
    CancelFlag is_cancelled = std::make_shared<std::atomic<bool>>(false);
  };
  struct Quarantined {
    kv::SequenceCache cache;
    absl::Time until;
  };

  absl::Status CheckReserve(const v1::ReserveCall& call) const;
  absl::StatusOr<uint64_t> Verify(const v1::HandoffCall& call, Transfer& transfer);
  absl::Status Admit(const v1::HandoffCall& call, const std::shared_ptr<Transfer>& transfer);
  StepLoop::Entry EntryOf(const std::string& transfer_id, engine::Sequence sequence,
                          const std::shared_ptr<TokenQueue>& queue, const CancelFlag& is_cancelled);
  void EndSequence(const std::string& transfer_id, engine::Sequence sequence,
                   const absl::Status& status, TokenQueue& queue);
  void Remove(const std::string& transfer_id);
  void Quarantine(kv::SequenceCache cache);  // Under mutex_.

  Worker* const worker_;
  rpc::MetricsExporter* const metrics_;
  TokenStreams streams_;
  mutable Mutex mutex_;
  CondVar removed_;
  std::map<std::string, std::shared_ptr<Transfer>> transfers_;  // Guarded by mutex_.
  std::vector<Quarantined> quarantine_;                         // Guarded by mutex_.
  bool is_draining_ = false;                                    // Guarded by mutex_.
};

}  // namespace isthmus::worker
