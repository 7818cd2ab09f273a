// SPDX-License-Identifier: Apache-2.0
// The decode worker's side of a request: set pages aside, verify what arrived in them, run the
// sequence, give everything back. No gRPC type appears here (worker_server.cc has them).
//
// A transfer is reserved, then admitting (its handoff is being verified), then running, then gone.
// Cancellation, the end of its router's stream and, while reserved, its lease end it early. Pages
// that a writer may still reach go into quarantine: no write starts after the lease, and none lasts
// longer than the quarantine.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"
#include "services/base/thread.h"
#include "services/rpc/metrics_exporter.h"
#include "services/worker/past_transfers.h"
#include "services/worker/token_streams.h"
#include "services/worker/worker.h"

namespace isthmus::worker {

class DecodeService {
 public:
  // Both must outlive the service. Starts the thread that takes back what has expired.
  DecodeService(Worker* worker, rpc::MetricsExporter* metrics);
  ~DecodeService();

  // The same reservation for the same transfer id. It has pages for the prompt and one token; more
  // are taken as the reply grows. Pages that hold the start of the prompt already are part of it
  // and need not be filled. InvalidArgument: no prompt, more tokens than a sequence may have, a
  // number of tokens that is not that of the ids. ResourceExhausted: no room now
  // (services/engine/admission.h). Unavailable, scope peer: the router has no token stream here, or
  // draining. Aborted: that transfer has ended here.
  absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call);

  // Verifies and admits. Aborted: the reservation is gone, or of another run. DataLoss names the
  // page group whose digest differs. Cancelled: by Cancel, or the router's stream has ended. After
  // an error the transfer is gone.
  absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call);

  // Returns when the pages are given back or in quarantine. DeadlineExceeded: the step that the
  // sequence is in takes longer than `timeout`. May be called again, to say that the writer is
  // done.
  absl::StatusOr<v1::CancelReply> Cancel(const v1::CancelCall& call, absl::Duration timeout);

  // Refuses reservations from now on; what is reserved may still be filled and run to its end.
  void Drain();

  // The queue that a router's stream reads; until the end of its stream it gets tokens through it.
  // A router that opens another one loses the old one and what ran on it. Aborted, scope peer: the
  // hello is for another run of this worker. Unavailable: stopping.
  absl::StatusOr<std::shared_ptr<TokenQueue>> OpenStream(const v1::TokensHello& hello);

  // The stream that reads `queue` has ended: so do the router's transfers.
  void CloseStream(uint64_t router_incarnation, const std::shared_ptr<TokenQueue>& queue);

  // Ends all streams, once they have been read to their end, and the service's thread. No stream
  // can be opened afterwards. The worker's step loop must have stopped before the service dies.
  void Stop();

  // Takes back expired reservations and frees pages whose quarantine is over. The service's thread
  // does it in time.
  void Sweep();

  // Reserved, admitting and running.
  int64_t num_transfers() const;

  // Returns when there are none, or after `patience`: the number that is left.
  int64_t AwaitIdle(absl::Duration patience);

  // Adds what the service knows to the load.
  void AddLoad(v1::WorkerLoad* load) const;

 private:
  // One of the replies to a prompt.
  struct Reply {
    // Of a further one until it runs: its state slot and pages for what it does not share.
    kv::SequenceCache cache;
    engine::Admission::Claim claim;  // Until it runs.
    bool is_open = false;            // It runs.
    // Output tokens that were put into the stream or came with the handoff. The loop's alone.
    int64_t num_sent = 1;
    CancelFlag is_cancelled = std::make_shared<std::atomic<bool>>(false);
  };
  struct Transfer {
    enum class State : uint8_t { kReserved, kAdmitting, kRunning };
    State state = State::kReserved;
    v1::ReserveCall call;
    v1::KvReservation reservation;
    kv::SequenceCache cache;  // What is transferred: the first reply's, once it runs.
    std::vector<int32_t> prompt;
    engine::PrefixTrace prefix;
    Urgency urgency;
    absl::Time expires;
    uint64_t digests_verified = 0;
    std::vector<Reply> replies;  // As many as were reserved for.
    size_t num_open = 0;         // Of these, once running.

    void CancelAll() {
      for (Reply& reply : replies) *reply.is_cancelled = true;
    }
  };
  struct Quarantined {
    kv::SequenceCache cache;
    absl::Time until;
  };
  using Transfers = std::map<std::string, std::shared_ptr<Transfer>>;

  absl::Status CheckReserve(const v1::ReserveCall& call) const;
  absl::Status TakeRoom(std::vector<int32_t> prompt, Transfer& transfer);
  absl::Status CheckRepliesFit(const v1::ReserveCall& call) const;
  absl::Status OpenForks(Transfer& transfer);
  absl::StatusOr<uint64_t> Verify(const v1::HandoffCall& call, Transfer& transfer);
  absl::StatusOr<std::vector<engine::Sequence>> SequencesOf(const v1::HandoffCall& call,
                                                            Transfer& transfer);
  absl::StatusOr<engine::Sequence> SequenceOf(const v1::HandoffCall& call, const Transfer& transfer,
                                              size_t reply_index) const;
  absl::Status Admit(const v1::HandoffCall& call, const std::shared_ptr<Transfer>& transfer);
  void Refuse(const v1::HandoffCall& call, Transfer& transfer, const absl::Status& status);
  absl::Status Run(const std::shared_ptr<Transfer>& transfer,
                   std::vector<engine::Sequence> sequences,
                   const std::shared_ptr<TokenQueue>& queue);
  StepLoop::Entry EntryOf(const std::shared_ptr<Transfer>& transfer, size_t reply_index,
                          engine::Sequence sequence, const std::shared_ptr<TokenQueue>& queue);
  static void SendTokens(Transfer& transfer, size_t reply_index, const engine::Sequence& sequence,
                         v1::SequenceTokens* message);
  void EndSequence(Transfer& transfer, size_t reply_index, engine::Sequence sequence,
                   const absl::Status& status, TokenQueue& queue);
  absl::StatusOr<v1::CancelReply> CancelReply(uint32_t reply_index, Transfer& transfer,
                                              MutexLock& lock, absl::Duration timeout);
  void EndTransfersOf(uint64_t router_incarnation);
  void RunSweeper();

  // Under mutex_.
  void Quarantine(Transfer& transfer);
  Transfers::iterator Erase(Transfers::iterator entry);
  void SweepAt(absl::Time now);
  void SweepBy(absl::Time due);
  absl::Time NextDue() const;

  Worker* const worker_;
  rpc::MetricsExporter* const metrics_;
  TokenStreams streams_;
  mutable Mutex mutex_;
  CondVar changed_;
  Transfers transfers_;                            // Guarded by mutex_, as all below.
  std::map<std::string, Quarantined> quarantine_;  // By transfer id.
  PastTransfers past_;
  bool is_draining_ = false;
  bool stops_ = false;
  CondVar sweep_changed_;
  absl::Time sweeps_at_;  // When the thread looks again.
  Thread sweeper_;
};

}  // namespace isthmus::worker
