// SPDX-License-Identifier: Apache-2.0
#include "services/rpc/server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <chrono>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "services/base/log.h"
#include "services/rpc/channel.h"

namespace isthmus::rpc {

void RouteGrpcLog() {
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_INFO);
  gpr_set_log_function([](gpr_log_func_args* record) {
    // gRPC calls an error what is one connection's trouble; whoever met it reports a status too.
    if (record->severity == GPR_LOG_SEVERITY_ERROR) LogWarning(record->message, {{"from", "grpc"}});
  });
}

absl::StatusOr<std::unique_ptr<RpcServer>> RpcServer::Start(
    const ServerOptions& options, const std::vector<grpc::Service*>& services) {
  // gRPC would take port 99999 for 34463, and a name for a port.
  const size_t colon = options.address.rfind(':');
  uint32_t wanted_port = 0;
  if (colon == std::string::npos ||
      !absl::SimpleAtoi(absl::string_view(options.address).substr(colon + 1), &wanted_port) ||
      wanted_port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        "listen: is \"", options.address, "\", want host:port with a port from 0 to 65535"));
  }
  grpc::EnableDefaultHealthCheckService(true);
  // Registers a plugin for all builders of the process: once is enough.
  static const bool has_reflection [[maybe_unused]] = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  grpc::ResourceQuota quota("server");
  quota.SetMaxThreads(options.max_threads);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // One poller is enough for sync calls of this size, and it keeps an idle process quiet.
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::SyncServerOption::MAX_POLLERS, 2);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // A second process on a taken port must fail instead of taking every other connection.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  for (grpc::Service* service : services) builder.RegisterService(service);
  int port = 0;
  builder.AddListeningPort(options.address, grpc::InsecureServerCredentials(), &port);

  std::unique_ptr<RpcServer> server(new RpcServer);
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", options.address, ": taken, or no such address"));
  }
  server->address_ = WithPort(options.address, port);
  if (!IsLoopback(options.address)) {
    LogWarning("other machines can reach this listener, and it has no TLS",
               {{"address", server->address_}});
  }
  server->SetLive(true);
  server->SetReady(false);
  return server;
}

RpcServer::~RpcServer() { Stop(absl::ZeroDuration()); }

void RpcServer::SetReady(bool is_ready) {
  is_ready_ = is_ready;
  server_->GetHealthCheckService()->SetServingStatus("readiness", is_ready);
  server_->GetHealthCheckService()->SetServingStatus("", is_ready);
}

void RpcServer::SetLive(bool is_live) {
  is_live_ = is_live;
  server_->GetHealthCheckService()->SetServingStatus("liveness", is_live);
}

void RpcServer::Stop(absl::Duration patience) {
  if (server_ == nullptr) return;
  SetReady(false);
  server_->Shutdown(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(patience));
  server_->Wait();
  server_.reset();
}

}  // namespace isthmus::rpc
