// SPDX-License-Identifier: Apache-2.0
// The life of a request, from one step to the next: accept, wait for a place, place, hand over,
// stream. No gRPC type appears here (router_server.cc has them).
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "router/accept.h"
#include "router/admission.h"
#include "router/cluster_view.h"
#include "services/rpc/metrics_exporter.h"

namespace isthmus::router {

// The client of one request. `write` blocks while the client is slow and is false when it is gone.
struct ClientStream {
  absl::Time deadline;
  std::function<bool()> is_cancelled;
  std::function<bool(const v1::GenerateReply&)> write;
};

class Router {
 public:
  // All must outlive the router.
  Router(const RouterConfig& config, const Acceptor* acceptor, ClusterView* view,
         rpc::MetricsExporter* metrics, Clock& clock)
      : acceptor_(acceptor),
        view_(view),
        metrics_(metrics),
        clock_(clock),
        admission_(config.max_active_requests, config.max_queued_requests) {}

  // Block their thread until the reply has been written or has failed.
  absl::Status Generate(const v1::GenerateRequest& request, const ClientStream& client);
  absl::Status Chat(const v1::ChatRequest& request, const ClientStream& client);

  v1::StatusReply Status() const;

  // OK when a request could be placed now; otherwise why not.
  absl::Status Readiness() const;

  int64_t active() const { return admission_.active(); }

 private:
  absl::Status Run(absl::StatusOr<RoutedRequest> accepted, const std::string& wanted_id,
                   const ClientStream& client);
  absl::Status Serve(const RoutedRequest& request, const ClientStream& client);
  absl::Status Stream(const RoutedRequest& request, uint32_t end_token_id, class Attempt& attempt,
                      const ClientStream& client);

  const Acceptor* const acceptor_;
  ClusterView* const view_;
  rpc::MetricsExporter* const metrics_;
  Clock& clock_;
  Admission admission_;
};

}  // namespace isthmus::router
