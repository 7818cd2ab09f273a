// SPDX-License-Identifier: Apache-2.0
// The life of a request, from one step to the next: accept, wait for a place, place, hand over,
// stream; and again on another pair when a worker failed before the first token. No gRPC type
// appears here (router_server.cc has them).
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "router/accept.h"
#include "router/admission.h"
#include "router/canceller.h"
#include "router/cluster_view.h"
#include "router/handoff.h"
#include "router/place.h"
#include "services/rpc/metrics_exporter.h"

namespace isthmus::router {

// The client of one request.
struct ClientStream {
  // May be infinite.
  absl::Time deadline;

  // Whether the client has left. Polled every few milliseconds.
  std::function<bool()> is_cancelled;

  // Blocks while the client is slow; false when it is gone.
  std::function<bool(const v1::GenerateReply&)> write;

  // Ends the client's call at once, so that a blocked `write` returns. Called by another thread
  // than the request's, once at most, when the client reads too slowly. May be empty.
  std::function<void()> cancel;
};

// Thread-safe.
class Router {
 public:
  // All must outlive the router. Takes over `view`'s OnChange.
  Router(const RouterConfig& config, const Acceptor* acceptor, ClusterView* view,
         rpc::MetricsExporter* metrics, Clock& clock);
  ~Router();

  // Block their thread until the reply has been written or has failed. What the workers still hold
  // then is given back in the background.
  absl::Status Generate(const v1::GenerateRequest& request, const ClientStream& client);
  absl::Status Chat(const v1::ChatRequest& request, const ClientStream& client);

  v1::StatusReply Status() const;

  // OK when a request could be placed now; otherwise why not.
  absl::Status Readiness() const;

  // Drains the worker at `address`, or this router when that is empty, and returns what is left
  // there after `patience` at most. NotFound: no such worker is registered.
  absl::StatusOr<v1::DrainReply> Drain(const v1::DrainTarget& target, absl::Duration patience);

  // Takes no more requests; those inside go on.
  void StopAdmission(const std::string& reason);
  bool is_draining() const { return admission_.is_closed(); }

  // Requests inside and cancellations that are not done.
  int64_t num_open() const;
  int64_t active() const { return admission_.active(); }

  // Brings the gauges up to date; called now and then.
  void PublishGauges() const;

  // Ends the cancellations in the background. No request may be inside.
  void Stop() { canceller_.Stop(); }

 private:
  absl::Status Run(absl::StatusOr<RoutedRequest> accepted, const std::string& wanted_id,
                   const ClientStream& client);
  absl::Status Serve(const RoutedRequest& request, const ClientStream& client);

  // One try on one pair, in line behind those that wait for room: OK is the whole reply. What
  // failed is added to `wish`; `may_retry` says whether another try makes sense.
  absl::Status Try(const RoutedRequest& request, const ClientStream& client, PlaceWish& wish,
                   Admission::Turn& turn, bool* may_retry);
  absl::StatusOr<Placement> Place(const RoutedRequest& request, const ClientStream& client,
                                  const PlaceWish& wish);
  absl::StatusOr<v1::ClusterValues> Values(const ClientStream& client);

  // Runs `find` again, for a while, when it found no usable worker and one may become usable.
  absl::Status Persist(absl::Time deadline, const ClientStream& client,
                       absl::FunctionRef<absl::Status()> find);
  absl::Status Stream(const RoutedRequest& request, uint32_t end_token_id, Attempt& attempt,
                      const ClientStream& client);
  // Writes what the tokens add to their reply.
  static absl::Status Write(const v1::SequenceTokens& tokens, Attempt& attempt,
                            class ReplySet& replies, const ClientStream& client);
  static absl::Status WritePromptLogprobs(const v1::PromptLogprobs& logprobs,
                                          const ClientStream& client);

  const RouterConfig config_;
  const Acceptor* const acceptor_;
  ClusterView* const view_;
  rpc::MetricsExporter* const metrics_;
  Clock& clock_;
  Placer placer_;
  Admission admission_;
  Canceller canceller_;
};

}  // namespace isthmus::router
