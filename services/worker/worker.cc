// SPDX-License-Identifier: Apache-2.0
#include "services/worker/worker.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/base/version.h"
#include "services/rpc/identity.h"
#include "services/worker/page_groups.h"

namespace isthmus::worker {
namespace {

// Writes wake the poll thread at once; this is how soon it sees that it should stop.
constexpr absl::Duration kPollWait = absl::Milliseconds(200);

absl::string_view RoleName(v1::WorkerRole role) {
  return role == v1::WORKER_ROLE_PREFILL ? "prefill" : "decode";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Worker>> Worker::Create(const WorkerConfig& config,
                                                       v1::WorkerRole role, Clock& clock) {
  if (config.checkpoint.empty()) {
    return absl::InvalidArgumentError("checkpoint: no directory is given");
  }
  // No patch exists yet, so the list of known ones is empty and any name is refused.
  ISTHMUS_RETURN_IF_ERROR(PatchSet::Resolve({}, config.patches).status());
  std::unique_ptr<Worker> worker(new Worker(config, clock));
  ISTHMUS_RETURN_IF_ERROR(worker->LoadModel());
  ISTHMUS_RETURN_IF_ERROR(worker->OpenTransport());
  worker->FillCard(role);
  worker->loop_->Start();
  Worker* const self = worker.get();
  worker->poll_thread_ = std::thread([self] {
    while (!self->stops_) {
      const absl::Status status = self->transport_->Poll(kPollWait);
      if (status.ok()) continue;
      LogError("the transport cannot make progress", {{"status", status.ToString()}});
      self->clock_.Sleep(kPollWait);
    }
  });
  return worker;
}

absl::Status Worker::LoadModel() {
  const int processors = static_cast<int>(std::thread::hardware_concurrency());
  threads_ = std::make_unique<ThreadPool>(config_.threads > 0 ? config_.threads
                                                              : std::clamp(processors, 1, 64));
  model::WeightOptions options;
  if (config_.index_topk > 0) options.index_topk = config_.index_topk;
  const auto arithmetic =
      config_.arithmetic == "math" ? kernels::Arithmetic::kMath : kernels::Arithmetic::kReference;
  ISTHMUS_ASSIGN_OR_RETURN(weights_,
                           model::Weights::Load(config_.checkpoint, options, threads_.get()));
  ISTHMUS_ASSIGN_OR_RETURN(
      forward_, model::ModelForward::Create(weights_.get(), arithmetic, config_.page_tokens));
  ISTHMUS_ASSIGN_OR_RETURN(pool_, kv::CachePool::Create(forward_->layout(), config_.cache_tokens,
                                                        config_.max_sequences));
  engine::EngineOptions engine_options;
  engine_options.chunk_tokens = config_.chunk_tokens;
  engine_options.eos_token_id = weights_->config().eos_token_id;
  kernels::Exec exec;
  exec.threads = threads_.get();
  exec.workspace = &workspace_;
  engine_ = std::make_unique<engine::Engine>(forward_.get(), pool_.get(), engine_options, exec);
  loop_ =
      std::make_unique<StepLoop>(engine_.get(), static_cast<size_t>(config_.max_queued_sequences),
                                 static_cast<size_t>(config_.max_sequences));
  return absl::OkStatus();
}

absl::Status Worker::OpenTransport() {
  transfer::UcxOptions options;
  options.lanes = config_.transfer_lanes;
  options.devices = config_.transfer_devices;
  ISTHMUS_ASSIGN_OR_RETURN(transport_, transfer::MakeUcxTransport(options));
  card_.set_incarnation(rpc::NewIncarnation());
  ISTHMUS_ASSIGN_OR_RETURN(
      endpoint_, transport_->Publish(RegionsOf(*pool_),
                                     {card_.incarnation(), forward_->layout().fingerprint}));
  if (config_.transfer_devices != "lo") {
    LogWarning("other machines may reach the transport's memory, and it has no TLS",
               {{"devices", config_.transfer_devices}});
  }
  return absl::OkStatus();
}

void Worker::FillCard(v1::WorkerRole role) {
  card_.set_role(role);
  card_.set_protocol_version(kProtocolVersion);
  card_.set_version(std::string(SemanticVersion()));
  v1::ClusterValues* values = card_.mutable_values();
  values->set_checkpoint_fingerprint(weights_->fingerprint());
  values->set_layout_fingerprint(forward_->layout().fingerprint);
  values->set_index_topk(static_cast<uint32_t>(weights_->config().index_topk));
  values->set_max_sequence_tokens(
      static_cast<uint64_t>(std::min<int64_t>(forward_->max_positions(), config_.cache_tokens)));
  values->set_arithmetic(config_.arithmetic);
  values->set_vocab_size(static_cast<uint32_t>(forward_->vocab_size()));
  values->set_end_token_id(static_cast<uint32_t>(weights_->config().eos_token_id));
  *card_.mutable_transfer() = endpoint_;
  card_.set_transfer_lane(transport_->lane());
}

Worker::~Worker() { Stop(); }

void Worker::Stop() {
  if (loop_ != nullptr) loop_->Stop();
  stops_ = true;
  if (poll_thread_.joinable()) poll_thread_.join();
}

v1::WorkerLoad Worker::load() const {
  v1::WorkerLoad load;
  load.set_active_sequences(static_cast<uint64_t>(loop_->num_sequences()));
  uint64_t free_pages = 0;
  uint64_t total_pages = 0;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const kv::PagePool& pages = pool_->pages(static_cast<kernels::CacheKindIndex>(k));
    free_pages += static_cast<uint64_t>(pages.num_free());
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
  return absl::FailedPreconditionError(absl::StrCat(
      "this worker's role is ", RoleName(card_.role()), ", the call is for ", RoleName(role)));
}

}  // namespace isthmus::worker
