// SPDX-License-Identifier: Apache-2.0
#include "router/router_server.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/cluster.grpc.pb.h"
#include "proto/generate.grpc.pb.h"
#include "services/base/mutex.h"
#include "services/base/status_macros.h"
#include "services/rpc/status.h"
#include "services/rpc/timekeeper.h"
#include "services/rpc/wire.h"

namespace isthmus::router {
namespace {

// The router answers DEADLINE_EXCEEDED at the request timeout, or when a worker that hangs has not
// let itself be cancelled for ten seconds more; past this it cannot.
constexpr absl::Duration kAnswerTime = absl::Seconds(15);
// Threads for status, health, reflection and draining.
constexpr int kSpareThreads = 16;
// Registration streams beyond the most workers: of those that are refused or come back.
constexpr size_t kSpareStreams = 16;
constexpr absl::Duration kLongestDrain = absl::Hours(1);

class GenerationRpc : public v1::Generation::Service {
 public:
  GenerationRpc(Router* router, rpc::Timekeeper* keeper, absl::Duration request_timeout)
      : router_(router), keeper_(keeper), patience_(request_timeout + kAnswerTime) {}

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateReply>* writer) override {
    const rpc::Timekeeper::Watch watch(keeper_, context, patience_);
    return rpc::ToGrpcStatus(router_->Generate(*request, StreamOf(context, writer)), context);
  }
  grpc::Status Chat(grpc::ServerContext* context, const v1::ChatRequest* request,
                    grpc::ServerWriter<v1::GenerateReply>* writer) override {
    const rpc::Timekeeper::Watch watch(keeper_, context, patience_);
    return rpc::ToGrpcStatus(router_->Chat(*request, StreamOf(context, writer)), context);
  }
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*,
                      v1::StatusReply* reply) override {
    *reply = router_->Status();
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainTarget* target,
                     v1::DrainReply* reply) override {
    const absl::Duration left = absl::FromChrono(context->deadline()) - absl::Now();
    absl::StatusOr<v1::DrainReply> drained =
        router_->Drain(*target, std::clamp(std::min(rpc::FromWire(target->patience()), left),
                                           absl::ZeroDuration(), kLongestDrain));
    if (!drained.ok()) return rpc::ToGrpcStatus(drained.status(), context);
    *reply = *std::move(drained);
    return grpc::Status::OK;
  }

 private:
  static ClientStream StreamOf(grpc::ServerContext* context,
                               grpc::ServerWriter<v1::GenerateReply>* writer) {
    return {absl::FromChrono(context->deadline()), [context] { return context->IsCancelled(); },
            [writer](const v1::GenerateReply& reply) { return writer->Write(reply); },
            [context] { context->TryCancel(); }};
  }

  Router* const router_;
  rpc::Timekeeper* const keeper_;
  const absl::Duration patience_;
};

class RegistrationRpc : public v1::Registration::Service {
 public:
  RegistrationRpc(ClusterView* view, rpc::Timekeeper* keeper, const RouterConfig& config)
      : view_(view),
        keeper_(keeper),
        // A worker that is silent for this long has no connection any more.
        silence_(10 * std::max(config.lease, config.heartbeat_interval)),
        max_streams_(static_cast<size_t>(config.max_workers) + kSpareStreams) {}

  grpc::Status Register(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::RouterCommand, v1::WorkerReport>* stream) override {
    const OpenStream open(this, context);
    // Streams that say nothing would take the threads of requests.
    if (open.count() > max_streams_) {
      return rpc::ToGrpcStatus(
          absl::ResourceExhaustedError(absl::StrCat(
              open.count(), " registration streams are open, want at most ", max_streams_)),
          context);
    }
    return rpc::ToGrpcStatus(Hold(context, stream), context);
  }

  void EndAll() {
    MutexLock lock(mutex_);
    is_ending_ = true;
    for (grpc::ServerContext* context : streams_) context->TryCancel();
  }

 private:
  using Stream = grpc::ServerReaderWriter<v1::RouterCommand, v1::WorkerReport>;

  // Lets EndAll reach a stream while it lives.
  class OpenStream {
   public:
    OpenStream(RegistrationRpc* rpc, grpc::ServerContext* context) : rpc_(rpc), context_(context) {
      MutexLock lock(rpc_->mutex_);
      rpc_->streams_.insert(context_);
      count_ = rpc_->streams_.size();
      if (rpc_->is_ending_) context_->TryCancel();
    }
    ~OpenStream() {
      MutexLock lock(rpc_->mutex_);
      rpc_->streams_.erase(context_);
    }
    // Of streams that were open when this one was, with it.
    size_t count() const { return count_; }

    OpenStream(const OpenStream&) = delete;
    OpenStream& operator=(const OpenStream&) = delete;

   private:
    RegistrationRpc* const rpc_;
    grpc::ServerContext* const context_;
    size_t count_ = 0;
  };

  absl::Status Hold(grpc::ServerContext* context, Stream* stream) {
    v1::WorkerReport report;
    if (!rpc::ReadWithin(rpc::kOpeningPatience, keeper_, context, stream, &report) ||
        !report.has_card()) {
      return absl::InvalidArgumentError("card: must open the stream");
    }
    ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<ClusterView::Registration> registration,
                             view_->Register(report.card()));
    v1::RouterCommand command;
    *command.mutable_registered() = view_->Welcome();
    bool goes_on = stream->Write(command);
    while (goes_on && rpc::ReadWithin(silence_, keeper_, context, stream, &report)) {
      if (report.has_load()) goes_on = registration->Report(report.load());
      if (report.has_draining()) goes_on = registration->SetDraining(report.draining().reason());
    }
    return goes_on ? absl::OkStatus()
                   : absl::AbortedError("another stream or run of the worker has registered");
  }

  ClusterView* const view_;
  rpc::Timekeeper* const keeper_;
  const absl::Duration silence_;
  const size_t max_streams_;
  Mutex mutex_;
  bool is_ending_ = false;                  // Guarded by mutex_.
  std::set<grpc::ServerContext*> streams_;  // Guarded by mutex_.
};

}  // namespace

struct RouterServer::State {
  State(const RouterConfig& config, Router* router, ClusterView* view)
      : generation(router, &keeper, config.request_timeout), registration(view, &keeper, config) {}
  rpc::Timekeeper keeper;
  GenerationRpc generation;
  RegistrationRpc registration;
  std::unique_ptr<rpc::RpcServer> server;
};

RouterServer::RouterServer(std::unique_ptr<State> state) : state_(std::move(state)) {}

RouterServer::~RouterServer() { Stop(absl::ZeroDuration()); }

absl::StatusOr<std::unique_ptr<RouterServer>> RouterServer::Start(const RouterConfig& config,
                                                                  Router* router,
                                                                  ClusterView* view) {
  auto state = std::make_unique<State>(config, router, view);
  rpc::ServerOptions options;
  options.address = config.listen;
  // Every active and every waiting request has a thread, and so has every worker's registration.
  options.max_threads = config.max_active_requests + config.max_queued_requests +
                        config.max_workers + static_cast<int>(kSpareStreams) + kSpareThreads;
  ISTHMUS_ASSIGN_OR_RETURN(
      state->server, rpc::RpcServer::Start(options, {&state->generation, &state->registration}));
  return std::unique_ptr<RouterServer>(new RouterServer(std::move(state)));
}

rpc::RpcServer& RouterServer::rpc() { return *state_->server; }

void RouterServer::Stop(absl::Duration patience) {
  state_->registration.EndAll();
  state_->server->Stop(patience);
}

}  // namespace isthmus::router
