// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker_server.h"

#include <algorithm>
#include <memory>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/stop_signal.h"
#include "services/rpc/channel.h"
#include "services/rpc/identity.h"
#include "services/rpc/registration_client.h"
#include "services/rpc/server.h"
#include "services/rpc/server_program.h"
#include "services/rpc/supervisor.h"
#include "services/rpc/wire.h"
#include "services/worker/decode_service.h"
#include "services/worker/drain.h"
#include "services/worker/prefill_service.h"
#include "services/worker/worker_load.h"
#include "services/worker/worker_metrics.h"
#include "services/worker/worker_plan.h"
#include "services/worker/worker_rpc.h"

namespace isthmus::worker {
namespace {

// How often gauges, health and the service manager are brought up to date.
constexpr absl::Duration kTick = absl::Milliseconds(500);
// The same while something is awaited: a registration, or the end of a drain.
constexpr absl::Duration kShortTick = absl::Milliseconds(20);
// For routers to hear of a drain, so that they count on a worker's end and place nothing on it.
constexpr absl::Duration kDrainNotice = absl::Milliseconds(100);
// For answers that are on their way when everything else has ended.
constexpr absl::Duration kLastAnswers = absl::Milliseconds(500);

absl::StatusOr<std::string> AdvertisedAddress(const WorkerConfig& config,
                                              const std::string& listener) {
  if (!config.advertise.empty()) return config.advertise;
  const bool is_wildcard =
      absl::StartsWith(listener, "0.0.0.0:") || absl::StartsWith(listener, "[::]:");
  if (config.routers.empty() || !is_wildcard) return listener;
  return absl::InvalidArgumentError(
      absl::StrCat("advertise: is empty, and routers cannot reach ", listener));
}

// What cannot be dialled would else show as a router that never answers.
absl::Status CheckAddresses(const WorkerConfig& config) {
  const auto refuse = [](absl::string_view field, const std::string& address,
                         absl::string_view wanted) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": is \"", address, "\", want ", wanted));
  };
  constexpr absl::string_view kHostPort = "host:port with a port from 1 to 65535";
  for (size_t i = 0; i < config.routers.size(); ++i) {
    const std::string field = absl::StrCat("routers[", i, "]");
    const auto end = config.routers.begin() + static_cast<ptrdiff_t>(i);
    if (!rpc::IsHostPort(config.routers[i])) return refuse(field, config.routers[i], kHostPort);
    if (std::find(config.routers.begin(), end, config.routers[i]) != end) {
      return refuse(field, config.routers[i], "every router once");
    }
  }
  if (config.advertise.empty() || rpc::IsHostPort(config.advertise)) return absl::OkStatus();
  return refuse("advertise", config.advertise, kHostPort);
}

void LogPlan(const engine::MemoryPlan& plan) {
  LogInfo("memory plan", {{"cache_tokens", plan.cache_tokens},
                          {"max_sequence_tokens", plan.max_sequence_tokens},
                          {"bytes_per_token", plan.bytes_per_token()},
                          {"max_sequences", plan.max_sequences},
                          {"snapshots", plan.snapshots},
                          {"weight_bytes", plan.weight_bytes},
                          {"step_bytes", plan.step_bytes},
                          {"pool_bytes", plan.pool_bytes},
                          {"host_store_bytes", plan.host_store_bytes},
                          {"total_bytes", plan.total_bytes}});
}

// One worker process from its model to its end. Everything is built here, in order.
class WorkerProcess {
 public:
  WorkerProcess(const WorkerConfig& config, v1::WorkerRole role)
      : config_(config), role_(role), metrics_(rpc::RoleName(role), kAllMetrics) {}

  absl::Status Start();
  void ServeUntilSignal();
  void Stop();

 private:
  bool IsReady() const;
  void Tick();
  void SetGauges();
  void CountPrefixes();
  void AwaitDrained();

  const absl::Time start_ = absl::Now();
  const WorkerConfig& config_;
  const v1::WorkerRole role_;
  rpc::MetricsExporter metrics_;
  std::unique_ptr<Worker> worker_;
  kv::PrefixCounts prefix_counts_;  // As exported.
  std::unique_ptr<PrefillService> prefill_;
  std::unique_ptr<DecodeService> decode_;
  std::unique_ptr<Drain> drain_;
  std::unique_ptr<WorkerRpc> rpc_;
  std::unique_ptr<rpc::RpcServer> server_;
  std::unique_ptr<rpc::RegistrationClient> registration_;
};

absl::Status WorkerProcess::Start() {
  ISTHMUS_RETURN_IF_ERROR(CheckAddresses(config_));
  const StepObserver observer = [this](const StepFigures& figures) {
    if (figures.num_sequences > 0) {
      metrics_.Observe(kStepSeconds, absl::ToDoubleSeconds(figures.duration));
      metrics_.Observe(kStepSequences, static_cast<double>(figures.num_sequences));
    }
    if (role_ != v1::WORKER_ROLE_DECODE) return;
    const int64_t for_step = figures.num_preemptions - figures.num_given_way;
    metrics_.Add(kPreemptions, static_cast<double>(for_step), {"step"});
    metrics_.Add(kPreemptions, static_cast<double>(figures.num_given_way), {"newcomer"});
    metrics_.Add(kRecomputedTokens, static_cast<double>(figures.num_recomputed_tokens));
    metrics_.Set(kPreemptedSequences, static_cast<double>(figures.num_preempted));
  };
  ISTHMUS_ASSIGN_OR_RETURN(worker_, Worker::Create(config_, role_, RealClock(), observer));
  LogPlan(worker_->plan());
  prefill_ = std::make_unique<PrefillService>(worker_.get(), &metrics_);
  decode_ = std::make_unique<DecodeService>(worker_.get(), &metrics_);
  drain_ = std::make_unique<Drain>(prefill_.get(), decode_.get());
  rpc_ = std::make_unique<WorkerRpc>(worker_.get(), prefill_.get(), decode_.get(), drain_.get());
  rpc::ServerOptions options;
  options.address = config_.listen;
  options.max_threads = WorkerRpc::MaxThreads(config_);
  ISTHMUS_ASSIGN_OR_RETURN(server_, rpc::RpcServer::Start(options, rpc_->services()));
  ISTHMUS_ASSIGN_OR_RETURN(const std::string address,
                           AdvertisedAddress(config_, server_->address()));
  rpc_->SetAddress(address);
  registration_ = std::make_unique<rpc::RegistrationClient>(
      config_.routers, rpc_->card(),
      rpc::RegistrationEvents{
          .load = [this] { return LoadOf(*worker_, *prefill_, *decode_); },
          .on_drain = [this](const std::string& reason) { drain_->Begin(reason); }},
      RealClock());
  drain_->SetOnBegin([this](const std::string& reason) {
    server_->SetReady(false);
    registration_->SetDraining(reason);
  });
  std::string metrics_address;
  if (!config_.metrics_listen.empty()) {
    ISTHMUS_ASSIGN_OR_RETURN(metrics_address, metrics_.Listen(config_.metrics_listen));
  }
  registration_->Start();
  Tick();
  if (!rpc::WriteAddressFile(config_.address_file, server_->address())) {
    return absl::UnavailableError(
        absl::StrCat("address_file: cannot write ", config_.address_file));
  }
  rpc::NotifyReady(absl::StrCat("serving at ", server_->address()));
  const v1::ClusterValues& values = worker_->card().values();
  LogInfo("serving", {{"address", server_->address()},
                      {"advertised", address},
                      {"metrics", metrics_address},
                      {"routers", static_cast<int64_t>(config_.routers.size())},
                      {"incarnation", absl::StrFormat("%016x", worker_->card().incarnation())},
                      {"checkpoint", absl::StrFormat("%016x", values.checkpoint_fingerprint())},
                      {"layout", absl::StrFormat("%016x", values.layout_fingerprint())},
                      {"index_topk", values.index_topk()},
                      {"index_key_format", values.index_key_format()},
                      {"lane", worker_->card().transfer_lane()},
                      {"start_seconds", absl::ToDoubleSeconds(absl::Now() - start_)}});
  return absl::OkStatus();
}

bool WorkerProcess::IsReady() const {
  const bool is_known = config_.routers.empty() || registration_->num_registered() > 0;
  return is_known && !drain_->is_draining();
}

void WorkerProcess::SetGauges() {
  const v1::WorkerLoad load = LoadOf(*worker_, *prefill_, *decode_);
  const auto set = [this](const MetricSpec& spec, uint64_t value) {
    metrics_.Set(spec, static_cast<double>(value));
  };
  set(kActiveSequences, load.active_sequences());
  set(kQueuedSequences, load.queued_sequences());
  set(kPendingPromptTokens, load.pending_prompt_tokens());
  set(kTransfers, load.transfers());
  set(kFreePages, load.free_pages());
  set(kTotalPages, load.total_pages());
  set(kFreeStateSlots, load.free_state_slots());
  set(kTotalStateSlots, load.total_state_slots());
  set(kQuarantinedPages, load.quarantined_pages());
  set(kIsDraining, drain_->is_draining() ? 1 : 0);
  set(kRegisteredRouters, static_cast<uint64_t>(registration_->num_registered()));
  CountPrefixes();
}

// The index counts by itself, since it knows of no metrics.
void WorkerProcess::CountPrefixes() {
  const kv::PrefixIndex* const index = worker_->pool().prefixes();
  if (index == nullptr) return;
  const kv::PrefixCounts counts = index->counts();
  const auto add = [this](const MetricSpec& spec, uint64_t now, uint64_t before) {
    metrics_.Add(spec, static_cast<double>(now - before));
  };
  add(kPrefixQueriedTokens, counts.queried_tokens, prefix_counts_.queried_tokens);
  add(kPrefixHitTokens, counts.hit_tokens, prefix_counts_.hit_tokens);
  add(kPrefixEvictedBlocks, counts.evicted_blocks, prefix_counts_.evicted_blocks);
  add(kPrefixEvictedSnapshots, counts.evicted_snapshots, prefix_counts_.evicted_snapshots);
  add(kPrefixOffloadedBlocks, counts.offloaded_blocks, prefix_counts_.offloaded_blocks);
  add(kPrefixLostBlocks, counts.lost_blocks, prefix_counts_.lost_blocks);
  add(kPrefixHostHitTokens, counts.host_hit_tokens, prefix_counts_.host_hit_tokens);
  add(kPrefixHostRefusedBytes, counts.host_refused_bytes, prefix_counts_.host_refused_bytes);
  prefix_counts_ = counts;
  metrics_.Set(kPrefixTokens, static_cast<double>(index->num_blocks() * kPrefixBlockTokens));
  metrics_.Set(kPrefixHostBytes, static_cast<double>(index->host_bytes()));
}

void WorkerProcess::Tick() {
  SetGauges();
  const bool is_live = worker_->is_live();
  if (is_live != server_->is_live()) {
    Log(is_live ? LogLevel::kInfo : LogLevel::kError,
        is_live ? "the step loop goes on" : "the step loop is stuck",
        {{"stalled_for", worker_->loop().stalled_for()}});
    server_->SetLive(is_live);
  }
  if (is_live) rpc::NotifyAlive();
  const bool is_ready = IsReady();
  if (is_ready == server_->is_ready()) return;
  server_->SetReady(is_ready);
  LogInfo(is_ready ? "ready" : "not ready",
          {{"registered", registration_->num_registered()}, {"problem", registration_->problem()}});
}

void WorkerProcess::ServeUntilSignal() {
  int signal = 0;
  while (signal == 0) {
    const bool is_awaited = !server_->is_ready() && !drain_->is_draining();
    signal = WaitForStopSignal(is_awaited ? kShortTick : kTick);
    Tick();
  }
  rpc::NotifyStopping();
  drain_->Begin(absl::StrCat("signal ", signal));
  AwaitDrained();
}

// Until nothing is left, patience is over or a second signal comes.
void WorkerProcess::AwaitDrained() {
  const absl::Time begin = absl::Now();
  const absl::Time end = begin + config_.stop_patience;
  const absl::Time told =
      registration_->num_registered() > 0 ? begin + kDrainNotice : absl::InfinitePast();
  while ((drain_->num_left() > 0 || absl::Now() < told) && absl::Now() < end) {
    if (WaitForStopSignal(kShortTick) != 0) break;
    Tick();
  }
  if (drain_->num_left() > 0) {
    LogWarning("ending what is left", {{"transfers", drain_->num_left()}});
  }
}

void WorkerProcess::Stop() {
  // Sequences end with an error, their messages leave, then the streams end.
  worker_->StopSteps();
  decode_->Stop();
  server_->Stop(kLastAnswers);
  registration_->Stop();
  worker_->Stop();
  LogInfo("stopped");
}

absl::StatusOr<std::string> PrintedPlan(const WorkerConfig& config) {
  ISTHMUS_ASSIGN_OR_RETURN(const ModelShape shape, ReadModelShape(config));
  ISTHMUS_ASSIGN_OR_RETURN(const engine::MemoryPlan plan, PlanWorker(config, shape));
  return engine::MemoryPlanJson(plan);
}

absl::Status Serve(const WorkerConfig& config, v1::WorkerRole role) {
  WorkerProcess process(config, role);
  ISTHMUS_RETURN_IF_ERROR(process.Start());
  process.ServeUntilSignal();
  process.Stop();
  return absl::OkStatus();
}

}  // namespace

int RunWorker(const ProgramSpec& spec, v1::WorkerRole role, const char* default_listen, int argc,
              const char* const* argv) {
  WorkerConfig config;
  config.listen = default_listen;
  ConfigFields fields = ConfigFields::Of(config);
  ProgramSpec worker_spec = spec;
  worker_spec.prints.push_back(
      {"--print-plan", "Print what memory the model and the cache would take, as JSON, and exit",
       [&config] { return PrintedPlan(config); }});
  return rpc::RunServer(worker_spec, fields, config.log_level, argc, argv,
                        [&] { return Serve(config, role); });
}

}  // namespace isthmus::worker
