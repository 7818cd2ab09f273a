// SPDX-License-Identifier: Apache-2.0
// How the router talks to one worker: one of the project's six interfaces (gRPC here; in-process
// for simulations). No gRPC type appears in it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "proto/worker.pb.h"

namespace isthmus::rpc {

struct CallOptions {
  absl::Duration timeout;

  // Polled every few milliseconds while the call runs; true ends it with CANCELLED on both sides.
  // Empty: never.
  std::function<bool()> is_cancelled;
};

// Every call blocks its thread, which may be any. Errors carry the worker's address and a fault
// scope; a worker that cannot be reached is UNAVAILABLE with scope peer.
class WorkerClient {
 public:
  virtual ~WorkerClient() = default;

  virtual const std::string& address() const = 0;

  virtual absl::StatusOr<v1::DescribeReply> Describe(const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::KvReservation> Reserve(const v1::ReserveCall& call,
                                                    const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::PrefillReply> Prefill(const v1::PrefillCall& call,
                                                   const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::CancelReply> CancelPrefill(const v1::CancelCall& call,
                                                        const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::HandoffReply> Handoff(const v1::HandoffCall& call,
                                                   const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::CancelReply> CancelDecode(const v1::CancelCall& call,
                                                       const CallOptions& options) = 0;
  virtual absl::StatusOr<v1::DrainReply> Drain(const v1::DrainCall& call,
                                               const CallOptions& options) = 0;

  // Reads the token stream until it ends, which is never OK: CANCELLED when `is_cancelled` says so,
  // otherwise what the worker or the connection said. `on_open` is called once the worker has
  // accepted the stream; sequences may be handed over from then on. `options.timeout` bounds the
  // opening alone.
  virtual absl::Status ReadTokens(const v1::TokensHello& hello, const CallOptions& options,
                                  absl::FunctionRef<void()> on_open,
                                  absl::FunctionRef<void(const v1::StepTokens&)> on_step) = 0;
};

std::unique_ptr<WorkerClient> ConnectWorker(const std::string& address);

}  // namespace isthmus::rpc
