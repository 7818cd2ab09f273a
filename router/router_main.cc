// SPDX-License-Identifier: Apache-2.0
// isthmus-router: accepts requests, places them on workers and streams the replies.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "router/router_metrics.h"
#include "router/router_server.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/stop_signal.h"
#include "services/rpc/identity.h"
#include "services/rpc/server_program.h"
#include "services/rpc/supervisor.h"

namespace isthmus::router {
namespace {

// How often readiness is computed anew; a start is noticed as fast.
constexpr absl::Duration kReadinessInterval = absl::Milliseconds(50);
// Gauges, and the service manager, every so many of those.
constexpr int kTicksPerGauges = 10;
constexpr absl::Duration kDrainPoll = absl::Milliseconds(20);

// Publishes readiness until a signal comes, which is returned.
int WatchUntilSignal(const Router& router, rpc::RpcServer& server, absl::Time start) {
  bool is_first = true;
  for (int tick = 0;; ++tick) {
    const absl::Status readiness = router.Readiness();
    if (readiness.ok() != server.is_ready()) {
      server.SetReady(readiness.ok());
      if (readiness.ok()) {
        LogInfo("ready", {{"address", server.address()},
                          {"start_seconds", absl::ToDoubleSeconds(RealClock().Now() - start)}});
      } else {
        LogWarning("not ready", {{"status", readiness.ToString()}});
      }
    } else if (is_first && !readiness.ok()) {
      LogInfo("waits for workers", {{"status", readiness.ToString()}});
    }
    // To the service manager a router is ready when workers can register: they may start after it.
    if (is_first) rpc::NotifyReady(absl::StrCat("serves at ", server.address()));
    is_first = false;
    if (tick % kTicksPerGauges == 0) {
      router.PublishGauges();
      rpc::NotifyAlive();
    }
    if (const int signal = WaitForStopSignal(kReadinessInterval); signal != 0) return signal;
  }
}

// Takes nothing more and lets the rest finish, for as long as `patience` or until a second signal.
void DrainRequests(Router& router, rpc::RpcServer& server, absl::Duration patience) {
  rpc::NotifyStopping();
  router.StopAdmission("SIGTERM");
  server.SetReady(false);
  const absl::Time end = RealClock().Now() + patience;
  while (RealClock().Now() < end && router.num_open() > 0 && WaitForStopSignal(kDrainPoll) == 0) {
    rpc::NotifyAlive();
  }
}

// Everything is built here, in order, and passed down.
absl::Status Serve(const RouterConfig& config) {
  const absl::Time start = RealClock().Now();
  ISTHMUS_RETURN_IF_ERROR(ClusterView::CheckConfig(config));
  rpc::MetricsExporter metrics("router", kAllMetrics);
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<Acceptor> acceptor, Acceptor::Create(config));
  ClusterView view(config, rpc::ConnectWorker, RealClock());
  Router router(config, acceptor.get(), &view, &metrics, RealClock());
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<RouterServer> server,
                           RouterServer::Start(config, &router, &view));
  std::string metrics_address;
  if (!config.metrics_listen.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(metrics_address, metrics.Listen(config.metrics_listen));
  }
  const std::string address = server->rpc().address();
  if (!rpc::WriteAddressFile(config.address_file, address)) {
    return absl::UnavailableError(absl::StrCat("address_file: cannot write ", config.address_file));
  }
  LogInfo("listening", {{"address", address},
                        {"metrics", metrics_address},
                        {"incarnation", absl::StrFormat("%016x", view.incarnation())}});
  const int signal = WatchUntilSignal(router, server->rpc(), start);
  LogInfo("stopping", {{"signal", signal}, {"active_requests", router.active()}});
  DrainRequests(router, server->rpc(), config.stop_patience);
  server->Stop(absl::Milliseconds(500));
  router.Stop();
  view.Stop();
  LogInfo("stopped");
  return absl::OkStatus();
}

int RunRouter(int argc, const char* const* argv) {
  RouterConfig config;
  ConfigFields fields = ConfigFields::Of(config);
  const ProgramSpec spec = {"isthmus-router",
                            "Accepts requests, places them on workers and streams the replies."};
  return rpc::RunServer(spec, fields, config.log_level, argc, argv, [&] { return Serve(config); });
}

}  // namespace
}  // namespace isthmus::router

int main(int argc, char** argv) { return isthmus::router::RunRouter(argc, argv); }
