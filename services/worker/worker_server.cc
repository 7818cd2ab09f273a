// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker_server.h"

#include <grpcpp/server_context.h>
#include <grpcpp/support/sync_stream.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "proto/cluster.grpc.pb.h"
#include "proto/worker.grpc.pb.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/stop_signal.h"
#include "services/rpc/identity.h"
#include "services/rpc/server.h"
#include "services/rpc/status.h"
#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

// How soon the thread of an idle token stream sees that its router is gone.
constexpr absl::Duration kStreamWait = absl::Milliseconds(100);
constexpr absl::Duration kSweepInterval = absl::Milliseconds(200);
// Sequences in one message at most.
constexpr int kMaxMerged = 1024;

CallScope ScopeOf(grpc::ServerContext* context) {
  return {absl::FromChrono(context->deadline()), [context] { return context->IsCancelled(); }};
}

class ClusterRpc : public v1::Cluster::Service {
 public:
  explicit ClusterRpc(Worker* worker) : worker_(worker) {}

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest*,
                        v1::DescribeReply* reply) override {
    *reply->mutable_card() = worker_->card();
    *reply->mutable_load() = worker_->load();
    return grpc::Status::OK;
  }

 private:
  Worker* const worker_;
};

class PrefillRpc : public v1::PrefillService::Service {
 public:
  explicit PrefillRpc(PrefillService* service) : service_(service) {}

  grpc::Status Prefill(grpc::ServerContext* context, const v1::PrefillCall* call,
                       v1::KvHandoff* reply) override {
    absl::StatusOr<v1::KvHandoff> handoff = service_->Prefill(*call, ScopeOf(context));
    if (!handoff.ok()) {
      LogWarning("a prefill failed",
                 {{"request_id", call->request_id()}, {"status", handoff.status().ToString()}});
      return rpc::ToGrpcStatus(handoff.status(), context);
    }
    *reply = *std::move(handoff);
    return grpc::Status::OK;
  }

 private:
  PrefillService* const service_;
};

class DecodeRpc : public v1::DecodeService::Service {
 public:
  explicit DecodeRpc(DecodeService* service) : service_(service) {}

  grpc::Status Reserve(grpc::ServerContext* context, const v1::ReserveCall* call,
                       v1::KvReservation* reply) override {
    return Answer(service_->Reserve(*call), reply, context);
  }
  grpc::Status Handoff(grpc::ServerContext* context, const v1::HandoffCall* call,
                       v1::HandoffReply* reply) override {
    return Answer(service_->Handoff(*call), reply, context);
  }
  grpc::Status Cancel(grpc::ServerContext* context, const v1::CancelCall* call,
                      v1::CancelReply* reply) override {
    const absl::Duration left =
        std::min(absl::FromChrono(context->deadline()) - absl::Now(), absl::Minutes(1));
    return Answer(service_->Cancel(*call, left), reply, context);
  }

  grpc::Status Tokens(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::StepTokens, v1::TokensControl>* stream) override {
    v1::TokensControl control;
    if (!stream->Read(&control) || !control.has_hello()) {
      return rpc::ToGrpcStatus(absl::InvalidArgumentError("hello: must open the stream"), context);
    }
    const auto queue = service_->OpenStream(control.hello());
    if (!queue.ok()) return rpc::ToGrpcStatus(queue.status(), context);
    stream->SendInitialMetadata();
    LogInfo("a router reads tokens",
            {{"router", absl::StrFormat("%016x", control.hello().router_incarnation())}});
    WriteTokens(context, **queue, stream);
    service_->CloseStream(control.hello().router_incarnation());
    return rpc::ToGrpcStatus(absl::UnavailableError("the token stream ends"), context);
  }

 private:
  template <typename Reply>
  static grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply,
                             grpc::ServerContext* context) {
    if (!result.ok()) return rpc::ToGrpcStatus(result.status(), context);
    *reply = *std::move(result);
    return grpc::Status::OK;
  }

  static void WriteTokens(grpc::ServerContext* context, TokenQueue& queue,
                          grpc::ServerReaderWriter<v1::StepTokens, v1::TokensControl>* stream) {
    while (!context->IsCancelled()) {
      std::optional<v1::SequenceTokens> tokens = queue.PopFor(kStreamWait);
      if (!tokens.has_value()) {
        if (queue.is_closed()) return;
        continue;
      }
      v1::StepTokens step;
      while (tokens.has_value()) {
        *step.add_sequences() = *std::move(tokens);
        if (step.sequences_size() >= kMaxMerged) break;
        tokens = queue.PopFor(absl::ZeroDuration());
      }
      if (!stream->Write(step)) return;
    }
  }

  DecodeService* const service_;
};

LogLevel LevelOf(const std::string& name) {
  for (const LogLevel level : {LogLevel::kDebug, LogLevel::kInfo, LogLevel::kWarning}) {
    if (LogLevelName(level) == name) return level;
  }
  return LogLevel::kError;
}

// Everything is built here, in order, and passed down.
absl::Status Serve(const WorkerConfig& config, v1::WorkerRole role) {
  const absl::Time start = absl::Now();
  rpc::MetricsExporter metrics(role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode", kAllMetrics);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<Worker> worker,
                           Worker::Create(config, role, RealClock()));
  PrefillService prefill(worker.get(), &metrics);
  DecodeService decode(worker.get(), &metrics);
  ClusterRpc cluster_rpc(worker.get());
  PrefillRpc prefill_rpc(&prefill);
  DecodeRpc decode_rpc(&decode);
  rpc::ServerOptions options;
  options.address = config.listen;
  ISTHMUS_ASSIGN_OR_RETURN(
      const std::unique_ptr<rpc::RpcServer> server,
      rpc::RpcServer::Start(options, {&cluster_rpc, &prefill_rpc, &decode_rpc}));
  std::string metrics_address;
  if (!config.metrics_listen.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(metrics_address, metrics.Listen(config.metrics_listen));
  }
  server->SetReady(true);
  if (!rpc::WriteAddressFile(config.address_file, server->address())) {
    return absl::UnavailableError(absl::StrCat("address_file: cannot write ", config.address_file));
  }
  const v1::ClusterValues& values = worker->card().values();
  LogInfo("ready", {{"address", server->address()},
                    {"metrics", metrics_address},
                    {"incarnation", absl::StrFormat("%016x", worker->card().incarnation())},
                    {"checkpoint", absl::StrFormat("%016x", values.checkpoint_fingerprint())},
                    {"layout", absl::StrFormat("%016x", values.layout_fingerprint())},
                    {"index_topk", values.index_topk()},
                    {"lane", worker->card().transfer_lane()},
                    {"start_seconds", absl::ToDoubleSeconds(absl::Now() - start)}});
  int signal = 0;
  while (signal == 0) {
    signal = WaitForStopSignal(kSweepInterval);
    decode.Sweep();
  }
  LogInfo("stopping", {{"signal", signal}, {"transfers", decode.num_transfers()}});
  server->SetReady(false);
  decode.Drain();
  const absl::Time patience = absl::Now() + config.stop_patience;
  while (absl::Now() < patience && decode.num_transfers() + worker->loop().num_sequences() > 0 &&
         WaitForStopSignal(absl::Milliseconds(20)) == 0) {
  }
  decode.Stop();
  server->Stop(absl::Milliseconds(500));
  worker->Stop();
  LogInfo("stopped");
  return absl::OkStatus();
}

}  // namespace

int RunWorker(const ProgramSpec& spec, v1::WorkerRole role, const char* default_listen, int argc,
              const char* const* argv) {
  WorkerConfig config;
  config.listen = default_listen;
  ConfigFields fields = ConfigFields::Of(config);
  if (const std::optional<int> code = StartProgram(spec, fields, argc, argv)) return *code;
  SetUpLog(spec.name, LevelOf(config.log_level));
  BlockStopSignals();
  rpc::RouteGrpcLog();
  const absl::Status status = Serve(config, role);
  if (status.ok()) return 0;
  LogError("cannot serve", {{"status", status.ToString()}});
  return absl::IsInvalidArgument(status) || absl::IsNotFound(status) ? 2 : 1;
}

}  // namespace isthmus::worker
