// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/patches.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/model/scripted_forward.h"
#include "services/rpc/identity.h"
#include "services/rpc/wire.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_plan.h"

namespace isthmus::worker {
namespace {

// Writes wake the poll thread at once; this is how soon it sees that it should stop.
constexpr absl::Duration kPollWait = absl::Milliseconds(200);

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const WorkerConfig& config,
                                                       v1::WorkerRole role, Clock& clock,
                                                       StepObserver on_step) {
  WorkerParts parts;
  parts.on_step = std::move(on_step);
  transfer::UcxOptions options;
  options.lanes = config.transfer_lanes;
  options.devices = config.transfer_devices;
  ISTHMUS_ASSIGN_OR_RETURN(parts.transport, transfer::MakeUcxTransport(options));
  if (config.transfer_devices != "lo") {
    LogWarning("other machines may reach the transport's memory, and it has no TLS",
               {{"devices", config.transfer_devices}});
  }
  return Assemble(config, role, std::move(parts), clock);
}

absl::StatusOr<std::unique_ptr<Worker>> Worker::Assemble(const WorkerConfig& config,
                                                         v1::WorkerRole role, WorkerParts parts,
                                                         Clock& clock) {
  ISTHMUS_ASSIGN_OR_RETURN(PatchSet patches,
                           kernels::ResolvePatches(config.patches, config.batch_invariant));
  if (config.quarantine_time <= config.transfer_timeout) {
    return absl::InvalidArgumentError(absl::StrCat(
        "quarantine_time: is ", absl::FormatDuration(config.quarantine_time),
        ", want longer than transfer.timeout, ", absl::FormatDuration(config.transfer_timeout)));
  }
  std::unique_ptr<Worker> worker(new Worker(config, clock));
  worker->patches_ = std::move(patches);
  worker->transport_ = std::move(parts.transport);
  ISTHMUS_RETURN_IF_ERROR(worker->TakeModel(parts));
  ISTHMUS_RETURN_IF_ERROR(worker->Publish(parts.incarnation, role));
  worker->FillCard(role);
  worker->loop_->Start(std::move(parts.on_step));
  if (role == v1::WORKER_ROLE_DECODE) {  // Nobody writes into the pages of others.
    Worker* const self = worker.get();
    worker->poll_thread_ = Thread(clock, [self] { self->PollTransport(); });
  }
  return worker;
}

void Worker::PollTransport() {
  while (!stops_) {
    const absl::Status status = transport_->Poll(kPollWait);
    if (status.ok()) continue;
    LogError("the transport cannot make progress", {{"status", status.ToString()}});
    clock_.Sleep(kPollWait);
  }
}

absl::Status Worker::TakeModel(WorkerParts& parts) {
  v1::ClusterValues* values = card_.mutable_values();
  values->set_arithmetic("reference");
  if (parts.forward != nullptr) {
    forward_ = std::move(parts.forward);
    values->set_checkpoint_fingerprint(parts.checkpoint_fingerprint);
    ISTHMUS_ASSIGN_OR_RETURN(plan_,
                             PlanWorker(config_, {.layout = forward_->layout(),
                                                  .max_positions = forward_->max_positions()}));
    return BuildEngine(parts.end_token_id);
  }
  // Before the weights are read: what cannot fit is known at once.
  ISTHMUS_ASSIGN_OR_RETURN(const ModelShape shape, ReadModelShape(config_));
  ISTHMUS_ASSIGN_OR_RETURN(plan_, PlanWorker(config_, shape));
  workspace_.Reserve(shape.scratch_bytes);
  if (!shape.config.has_value()) {  // Scripted.
    const model::ScriptedOptions options = ScriptedOptionsOf(config_);
    ISTHMUS_ASSIGN_OR_RETURN(forward_, model::ScriptedForward::Create(options, clock_));
    values->set_checkpoint_fingerprint(model::ScriptedFingerprint(options));
    return BuildEngine(options.end_token_id);
  }
  ISTHMUS_RETURN_IF_ERROR(LoadCheckpoint(*shape.config));
  values->set_arithmetic(config_.arithmetic);
  values->set_checkpoint_fingerprint(weights_->fingerprint());
  values->set_index_topk(static_cast<uint32_t>(weights_->config().index_topk));
  return BuildEngine(weights_->config().eos_token_id);
}

absl::Status Worker::LoadCheckpoint(const model::ModelConfig& model) {
  threads_ = std::make_unique<ThreadPool>(NumThreads(config_));
  model::WeightOptions options;
  options.config = &model;
  if (config_.index_topk > 0) options.index_topk = config_.index_topk;
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<int> devices, DevicesOf(config_));
  if (!devices.empty()) options.residency = model::WeightOptions::kMapped;
  ISTHMUS_ASSIGN_OR_RETURN(weights_,
                           model::Weights::Load(config_.checkpoint, options, threads_.get()));
  if (devices.size() > 1) return OpenRanks(devices);
  model::ModelViews views = weights_->views();
  if (!devices.empty()) {
    ISTHMUS_RETURN_IF_ERROR(OpenDevice(devices[0]));
    views = device_weights_->views();
  }
  ISTHMUS_ASSIGN_OR_RETURN(const std::optional<kernels::EntryFormat> keys,
                           IndexKeyFormatOf(config_));
  ISTHMUS_ASSIGN_OR_RETURN(forward_, model::ModelForward::Create(views, ArithmeticOf(config_),
                                                                 config_.page_tokens, keys));
  return absl::OkStatus();
}

absl::Status Worker::OpenDevice(int device) {
  ISTHMUS_ASSIGN_OR_RETURN(device_, model::DeviceContext::Open(device));
  ISTHMUS_ASSIGN_OR_RETURN(
      device_weights_, model::DeviceWeights::Upload(*weights_, /*plan=*/nullptr, threads_.get()));
  LogInfo("the weights are on the device", {{"device", config_.device},
                                            {"name", device_->properties().name},
                                            {"bytes", device_weights_->bytes()}});
  return absl::OkStatus();
}

// The forward pass comes with the cache, in BuildEngine.
absl::Status Worker::OpenRanks(const std::vector<int>& devices) {
  RankGroupOptions options;
  options.devices = devices;
  options.arithmetic = ArithmeticOf(config_);
  options.page_tokens = config_.page_tokens;
  ISTHMUS_ASSIGN_OR_RETURN(options.index_key_format, IndexKeyFormatOf(config_));
  options.max_sequences = config_.max_sequences;
  // The last word comes before a probe finds the process not to be live.
  options.step_limit = config_.liveness_timeout * 3 / 4;
  ISTHMUS_ASSIGN_OR_RETURN(ranks_, RankGroup::Create(*weights_, options, threads_.get()));
  return absl::OkStatus();
}

const model::DeviceContext* Worker::device() const {
  return ranks_ != nullptr ? &ranks_->first() : device_.get();
}

absl::Status Worker::BuildEngine(int32_t end_token_id) {
  const int number = device() != nullptr ? device()->device() : kv::kHostMemory;
  const std::vector<int> replicas = ranks_ != nullptr ? ranks_->replicas() : std::vector<int>();
  const kv::PrefixOptions prefixes = {
      .num_snapshots = config_.prefix_snapshots,
      .snapshot_interval = config_.prefix_snapshot_interval,
      .tails = config_.prefix_tails,
      .checkpoint_fingerprint = card_.values().checkpoint_fingerprint(),
      .host_bytes = config_.prefix_host_bytes,
      .host_step_bytes = config_.prefix_host_step_bytes};
  ISTHMUS_ASSIGN_OR_RETURN(
      pool_, kv::CachePool::Create(ranks_ != nullptr ? ranks_->layout() : forward_->layout(),
                                   plan_.cache_tokens, static_cast<int32_t>(plan_.max_sequences),
                                   number, prefixes, replicas));
  if (ranks_ != nullptr) forward_ = ranks_->Join(*pool_, clock_);
  engine::EngineOptions options;
  options.chunk_tokens = config_.chunk_tokens;
  options.max_batch_tokens = config_.max_batch_tokens;
  options.eos_token_id = end_token_id;
  kernels::Exec exec;
  exec.workspace = &workspace_;
  if (device() != nullptr) exec = device()->exec();
  exec.threads = threads_.get();
  exec.patches = &patches_;
  exec.batch_invariant = config_.batch_invariant;
  engine_ = std::make_unique<engine::Engine>(forward_.get(), pool_.get(), options, exec);
  admission_ = std::make_unique<engine::Admission>(
      pool_.get(),
      engine::AdmissionOptions{config_.expected_output_quantile, config_.first_output_share},
      clock_);
  // Every sequence that is not preempted holds a state slot, so neither the inbox nor the batch can
  // overflow.
  const auto max_sequences = static_cast<size_t>(config_.max_sequences);
  loop_ = std::make_unique<StepLoop>(engine_.get(), admission_.get(), max_sequences, max_sequences,
                                     clock_);
  return absl::OkStatus();
}

absl::Status Worker::Publish(uint64_t incarnation, v1::WorkerRole role) {
  card_.set_incarnation(incarnation != 0 ? incarnation : rpc::NewIncarnation());
  card_.set_transfer_lane(transport_->lane());
  if (device() != nullptr) {
    ISTHMUS_ASSIGN_OR_RETURN(staging_,
                             PageStaging::Create(pool_.get(), role == v1::WORKER_ROLE_DECODE));
  }
  if (role != v1::WORKER_ROLE_DECODE) return absl::OkStatus();
  ISTHMUS_ASSIGN_OR_RETURN(
      *card_.mutable_transfer(),
      transport_->Publish(staging_ != nullptr ? staging_->regions() : RegionsOf(*pool_),
                          {card_.incarnation(), forward_->layout().fingerprint}));
  return absl::OkStatus();
}

void Worker::FillCard(v1::WorkerRole role) {
  card_.set_role(role);
  card_.set_protocol_version(kProtocolVersion);
  card_.set_version(std::string(SemanticVersion()));
  v1::ClusterValues* values = card_.mutable_values();
  values->set_layout_fingerprint(forward_->layout().fingerprint);
  values->set_index_key_format(std::string(
      kernels::IndexKeyFormatName(forward_->layout().kinds[kernels::kIndexKey].format)));
  values->set_max_sequence_tokens(static_cast<uint64_t>(plan_.max_sequence_tokens));
  values->set_vocab_size(static_cast<uint32_t>(forward_->vocab_size()));
  values->set_end_token_id(static_cast<uint32_t>(engine_->options().eos_token_id));
}

Worker::~Worker() { Stop(); }

void Worker::StopSteps() {
  if (loop_ != nullptr) loop_->Stop();
}

void Worker::Stop() {
  StopSteps();
  stops_ = true;
  poll_thread_.Join();
}

bool Worker::is_live() const { return loop_->stalled_for() <= config_.liveness_timeout; }

v1::WorkerLoad Worker::load() const {
  v1::WorkerLoad load;
  const int64_t queued = loop_->num_queued();
  load.set_queued_sequences(static_cast<uint64_t>(queued));
  // The two are not read at one moment.
  load.set_active_sequences(
      static_cast<uint64_t>(std::max<int64_t>(loop_->num_sequences() - queued, 0)));
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const kv::PagePool& pages = pool_->pages(static_cast<kernels::CacheKindIndex>(k));
    // What the prefix index alone holds is evicted for whoever needs it.
    free_pages += static_cast<uint64_t>(pages.num_available());
    total_pages += static_cast<uint64_t>(pages.num_pages());
  }
  load.set_free_pages(free_pages);
  load.set_total_pages(total_pages);
  load.set_free_state_slots(static_cast<uint64_t>(pool_->slots().num_free()));
  load.set_total_state_slots(static_cast<uint64_t>(pool_->slots().num_pages()));
  return load;
}

absl::Status Worker::CheckRole(v1::WorkerRole role) const {
  if (role == card_.role()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("this worker's role is ",
                                                    rpc::RoleName(card_.role()),
                                                    ", the call is for ", rpc::RoleName(role)));
}

}  // namespace isthmus::worker
