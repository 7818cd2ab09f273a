// SPDX-License-Identifier: Apache-2.0
// isthmus-router: accepts requests, places them on workers and streams the replies.
#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/generate.grpc.pb.h"
#include "router/router.h"
#include "router/router_metrics.h"
#include "services/base/log.h"
#include "services/base/mutex.h"
#include "services/base/program.h"
#include "services/base/status_macros.h"
#include "services/base/stop_signal.h"
#include "services/rpc/identity.h"
#include "services/rpc/server.h"
#include "services/rpc/status.h"

namespace isthmus::router {
namespace {

// How often readiness is computed anew; a start is noticed as fast.
constexpr absl::Duration kReadinessInterval = absl::Milliseconds(50);
// The router answers DEADLINE_EXCEEDED at the request timeout, or when a worker that hangs has not
// let itself be cancelled for ten seconds more; past this it cannot.
constexpr absl::Duration kAnswerTime = absl::Seconds(15);

// Ends calls at the request timeout whatever their thread waits for: a write to a client that has
// stopped reading would otherwise last as long as that client's connection.
class Timekeeper {
 public:
  explicit Timekeeper(absl::Duration timeout) : timeout_(timeout) {}

  // Watches one call while it lives.
  class Watch {
   public:
    Watch(Timekeeper* keeper, grpc::ServerContext* context) : keeper_(keeper), context_(context) {
      MutexLock lock(keeper_->mutex_);
      keeper_->calls_[context_] = absl::Now() + keeper_->timeout_;
    }
    ~Watch() {
      MutexLock lock(keeper_->mutex_);
      keeper_->calls_.erase(context_);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

   private:
    Timekeeper* const keeper_;
    grpc::ServerContext* const context_;
  };

  void CancelOverdue() {
    const absl::Time now = absl::Now();
    MutexLock lock(mutex_);
    for (const auto& [context, deadline] : calls_) {
      if (now >= deadline) context->TryCancel();
    }
  }

 private:
  const absl::Duration timeout_;
  Mutex mutex_;
  std::map<grpc::ServerContext*, absl::Time> calls_;  // Guarded by mutex_.
};

class GenerationRpc : public v1::Generation::Service {
 public:
  GenerationRpc(Router* router, Timekeeper* keeper) : router_(router), keeper_(keeper) {}

  grpc::Status Generate(grpc::ServerContext* context, const v1::GenerateRequest* request,
                        grpc::ServerWriter<v1::GenerateReply>* writer) override {
    const Timekeeper::Watch watch(keeper_, context);
    return rpc::ToGrpcStatus(router_->Generate(*request, StreamOf(context, writer)), context);
  }
  grpc::Status Chat(grpc::ServerContext* context, const v1::ChatRequest* request,
                    grpc::ServerWriter<v1::GenerateReply>* writer) override {
    const Timekeeper::Watch watch(keeper_, context);
    return rpc::ToGrpcStatus(router_->Chat(*request, StreamOf(context, writer)), context);
  }
  grpc::Status Status(grpc::ServerContext*, const v1::StatusRequest*,
                      v1::StatusReply* reply) override {
    *reply = router_->Status();
    return grpc::Status::OK;
  }

 private:
  static ClientStream StreamOf(grpc::ServerContext* context,
                               grpc::ServerWriter<v1::GenerateReply>* writer) {
    return {absl::FromChrono(context->deadline()), [context] { return context->IsCancelled(); },
            [writer](const v1::GenerateReply& reply) { return writer->Write(reply); }};
  }

  Router* const router_;
  Timekeeper* const keeper_;
};

LogLevel LevelOf(const std::string& name) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) {
    if (LogLevelName(level) == name) return level;
  }
  return LogLevel::kError;
}

// Publishes readiness until a signal comes, which is returned.
int WatchUntilSignal(const Router& router, Timekeeper& keeper, rpc::RpcServer& server,
                     absl::Time start) {
  bool is_first = true;
  while (true) {
    const absl::Status readiness = router.Readiness();
    if (readiness.ok() != server.is_ready()) {
      server.SetReady(readiness.ok());
      if (readiness.ok()) {
        LogInfo("ready", {{"address", server.address()},
                          {"start_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
      } else {
        LogWarning("not ready", {{"status", readiness.ToString()}});
      }
    } else if (is_first && !readiness.ok()) {
      LogInfo("waits for workers", {{"status", readiness.ToString()}});
    }
    is_first = false;
    keeper.CancelOverdue();
    if (const int signal = WaitForStopSignal(kReadinessInterval); signal != 0) return signal;
  }
}

// Everything is built here, in order, and passed down.
absl::Status Serve(const RouterConfig& config) {
  const absl::Time start = absl::Now();
  rpc::MetricsExporter metrics("router", kAllMetrics);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<Acceptor> acceptor, Acceptor::Create(config));
  ClusterView view(config, RealClock());
  Router router(config, acceptor.get(), &view, &metrics, RealClock());
  Timekeeper keeper(config.request_timeout + kAnswerTime);
  GenerationRpc generation(&router, &keeper);
  rpc::ServerOptions options;
  options.address = config.listen;
  // Every active and every waiting request has a thread, and some are left for status and health.
  options.max_threads = config.max_active_requests + config.max_queued_requests + 16;
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<rpc::RpcServer> server,
                           rpc::RpcServer::Start(options, {&generation}));
  std::string metrics_address;
  if (!config.metrics_listen.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(metrics_address, metrics.Listen(config.metrics_listen));
  }
  view.Start();
  if (!rpc::WriteAddressFile(config.address_file, server->address())) {
    return absl::UnavailableError(absl::StrCat("address_file: cannot write ", config.address_file));
  }
  LogInfo("listening", {{"address", server->address()},
                        {"metrics", metrics_address},
                        {"incarnation", absl::StrFormat("%016x", view.incarnation())}});
  const int signal = WatchUntilSignal(router, keeper, *server, start);
  LogInfo("stopping", {{"signal", signal}, {"active_requests", router.active()}});
  server->SetReady(false);
  const absl::Time patience = absl::Now() + config.stop_patience;
  while (absl::Now() < patience && router.active() > 0 &&
         WaitForStopSignal(absl::Milliseconds(20)) == 0) {
  }
  server->Stop(absl::Milliseconds(500));
  view.Stop();
  LogInfo("stopped");
  return absl::OkStatus();
}

int RunRouter(int argc, const char* const* argv) {
  RouterConfig config;
  ConfigFields fields = ConfigFields::Of(config);
  const ProgramSpec spec = {"isthmus-router",
                            "Accepts requests, places them on workers and streams the replies."};
  if (const std::optional<int> code = StartProgram(spec, fields, argc, argv)) return *code;
  SetUpLog(spec.name, LevelOf(config.log_level));
  BlockStopSignals();
  rpc::RouteGrpcLog();
  const absl::Status status = Serve(config);
  if (status.ok()) return 0;
  LogError("cannot serve", {{"status", status.ToString()}});
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ? 2 : 1;
}

}  // namespace
}  // namespace isthmus::router

int main(int argc, char** argv) { return isthmus::router::RunRouter(argc, argv); }
