// SPDX-License-Identifier: Apache-2.0
#include "tests/sim/worker_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/check.h"
#include "services/model/scripted_forward.h"
#include "services/rpc/wire.h"
#include "services/worker/worker_load.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::sim {
namespace {

// As many messages of a token stream are written as one.
constexpr int kMaxMerged = 64;
constexpr absl::Duration kStreamWait = absl::Milliseconds(200);

}  // namespace

WorkerRun::WorkerRun(const std::string& address, v1::WorkerRole role, const Surroundings& around)
    : address_(address), role_(role), around_(around), metrics_("worker", worker::kAllMetrics) {
  Clock& clock = *around_.clock;
  const model::ScriptedOptions& script = around_.scenario->script;
  worker::WorkerParts parts;
  parts.transport = transfer::MakeLoopbackTransport(around_.pages, address_, clock);
  auto forward = model::ScriptedForward::Create(script, clock);
  ISTHMUS_CHECK(forward.ok());
  parts.forward = *std::move(forward);
  parts.checkpoint_fingerprint = model::ScriptedFingerprint(script);
  parts.end_token_id = script.end_token_id;
  auto worker = worker::Worker::Assemble(around_.scenario->worker, role_, std::move(parts), clock);
  if (!worker.ok()) around_.journal->Violate(worker.status().ToString());
  ISTHMUS_CHECK(worker.ok());
  worker_ = *std::move(worker);
  prefill_ = std::make_unique<worker::PrefillService>(worker_.get(), &metrics_);
  decode_ = std::make_unique<worker::DecodeService>(worker_.get(), &metrics_);
  card_ = worker_->card();
  card_.set_address(address_);
  around_.watch->Watch(card_.incarnation(), &worker_->pool());
  server_ = around_.calls->Serve(address_, Methods());
  around_.journal->Note(absl::StrCat(address_, " starts, incarnation ",
                                     absl::Hex(card_.incarnation(), absl::kZeroPad16)));
  for (int i = 0; i < around_.scenario->num_routers; ++i) {
    threads_.emplace_back(clock, [this, i] { KeepRegistered(static_cast<size_t>(i)); });
  }
}

void WorkerRun::Stop(absl::Duration grace) {
  {
    MutexLock lock(mutex_);
    if (worker_ == nullptr) return;
    ends_ = true;
  }
  changed_.notify_all();
  threads_.clear();
  worker_->StopSteps();
  around_.journal->Count("preemption", num_preemptions());
  decode_->Stop();
  server_->Stop(grace);
  worker_->Stop();
  around_.watch->CheckPools();
  if (const kv::PrefixIndex* index = worker_->pool().prefixes(); index != nullptr) {
    const kv::PrefixCounts counts = index->counts();
    around_.journal->Count("token of a prefix hit", counts.hit_tokens);
    around_.journal->Count("evicted block", counts.evicted_blocks);
  }
  around_.watch->Forget(card_.incarnation());
  server_.reset();
  decode_.reset();
  prefill_.reset();
  worker_.reset();
  around_.journal->Note(absl::StrCat(address_, " has stopped"));
}

uint64_t WorkerRun::num_preemptions() const {
  return static_cast<uint64_t>(worker_->loop().num_preemptions());
}

bool WorkerRun::Pause(absl::Duration duration) {
  MutexLock lock(mutex_);
  return !around_.clock->WaitFor(changed_, lock, duration, [this] { return ends_; });
}

void WorkerRun::LoseRegistrations() {
  MutexLock lock(mutex_);
  ++num_losses_;
}

v1::WorkerLoad WorkerRun::Load() const { return worker::LoadOf(*worker_, *prefill_, *decode_); }

rpc::WorkerMethods WorkerRun::Methods() {
  rpc::WorkerMethods methods;
  methods.describe = [this](const v1::DescribeRequest&, const rpc::ServedCall&) {
    v1::DescribeReply reply;
    *reply.mutable_card() = card_;
    *reply.mutable_load() = Load();
    return absl::StatusOr<v1::DescribeReply>(std::move(reply));
  };
  methods.reserve = [this](const v1::ReserveCall& call, const rpc::ServedCall&) {
    absl::StatusOr<v1::KvReservation> reservation = decode_->Reserve(call);
    if (reservation.ok()) around_.watch->NoteReserved(*reservation);
    return Counted("reserve", std::move(reservation));
  };
  methods.prefill = [this](const v1::PrefillCall& call, const rpc::ServedCall& scope) {
    PageWatch::WriteFor(call.reservation().transfer_id());
    return Counted("prefill", prefill_->Prefill(call, {scope.deadline, scope.is_cancelled}));
  };
  methods.cancel_prefill = [this](const v1::CancelCall& call, const rpc::ServedCall& scope) {
    return Counted("cancel prefill", prefill_->Cancel(call, scope.deadline - around_.clock->Now()));
  };
  methods.handoff = [this](const v1::HandoffCall& call, const rpc::ServedCall&) {
    absl::StatusOr<v1::HandoffReply> reply = decode_->Handoff(call);
    if (reply.ok()) around_.watch->NoteRunning(call.handoff().transfer_id());
    return Counted("handoff", std::move(reply));
  };
  methods.cancel_decode = [this](const v1::CancelCall& call, const rpc::ServedCall& scope) {
    return Counted(call.writer_is_done() ? "cancel decode" : "cancel decode, quarantine",
                   decode_->Cancel(call, scope.deadline - around_.clock->Now()));
  };
  methods.drain = [this](const v1::DrainCall& call, const rpc::ServedCall&) { return Drain(call); };
  methods.tokens = [this](const v1::TokensHello& hello, const rpc::ServedCall& scope,
                          const rpc::TokenSink& sink) { return ServeTokens(hello, scope, sink); };
  return methods;
}

absl::Status WorkerRun::ServeTokens(const v1::TokensHello& hello, const rpc::ServedCall& scope,
                                    const rpc::TokenSink& sink) {
  const auto queue = decode_->OpenStream(hello);
  if (!queue.ok()) return queue.status();
  sink.open();
  while (!scope.is_cancelled()) {
    std::optional<v1::SequenceTokens> tokens = (*queue)->PopFor(kStreamWait);
    if (!tokens.has_value()) {
      if ((*queue)->is_closed()) break;
      continue;
    }
    v1::StepTokens step;
    while (tokens.has_value()) {
      *step.add_sequences() = *std::move(tokens);
      if (step.sequences_size() >= kMaxMerged) break;
      tokens = (*queue)->PopFor(absl::ZeroDuration());
    }
    if (!sink.write(step)) break;
  }
  decode_->CloseStream(hello.router_incarnation(), *queue);
  return absl::UnavailableError("the token stream ends");
}

void WorkerRun::KeepRegistered(size_t router) {
  while (Pause(absl::Milliseconds(5))) {
    const std::shared_ptr<RouterRun> run = around_.routers->at(router);
    if (run == nullptr || run->is_down() ||
        around_.calls->link(run->name(), address_) != rpc::LinkState::kUp) {
      Pause(absl::Milliseconds(100));
      continue;
    }
    auto registration = run->view().Register(card_);
    if (!registration.ok()) {
      around_.journal->Note(
          absl::StrCat(address_, " is refused: ", registration.status().ToString()));
      Pause(absl::Milliseconds(300));
      continue;
    }
    around_.journal->Note(absl::StrCat(address_, " is registered with ", run->name()));
    HoldRegistration(*run, **registration);
    registration->reset();
    around_.journal->Note(absl::StrCat(address_, " is no longer registered with ", run->name()));
  }
}

void WorkerRun::HoldRegistration(RouterRun& router,
                                 router::ClusterView::Registration& registration) {
  const router::RouterConfig& config = around_.scenario->router;
  std::string last_load;
  absl::Time last_at = absl::InfinitePast();
  absl::Time heard_at = around_.clock->Now();
  bool has_told = false;
  int num_losses = 0;
  {
    MutexLock lock(mutex_);
    num_losses = num_losses_;
  }
  while (Pause(config.load_interval) && !router.is_down()) {
    const absl::Time now = around_.clock->Now();
    const rpc::LinkState link = around_.calls->link(router.name(), address_);
    if (link == rpc::LinkState::kReset || now - heard_at > Scenario::kKeepalive) return;
    if (link == rpc::LinkState::kSilent) continue;
    heard_at = now;
    bool is_draining = false;
    {
      MutexLock lock(mutex_);
      if (num_losses_ != num_losses) return;
      is_draining = is_draining_;
    }
    if (is_draining && !has_told) {
      if (!registration.SetDraining("an operator asked")) return;
      has_told = true;
    }
    const v1::WorkerLoad load = Load();
    std::string bytes = load.SerializeAsString();
    if (bytes == last_load && now - last_at < config.heartbeat_interval) continue;
    last_load = std::move(bytes);
    last_at = now;
    if (!registration.Report(load)) return;
  }
}

absl::StatusOr<v1::DrainReply> WorkerRun::Drain(const v1::DrainCall& call) {
  {
    MutexLock lock(mutex_);
    is_draining_ = true;
  }
  const absl::Duration patience = rpc::FromWire(call.patience());
  v1::DrainReply reply;
  if (role_ == v1::WORKER_ROLE_PREFILL) {
    prefill_->Drain();
    reply.set_transfers(static_cast<uint64_t>(prefill_->AwaitIdle(patience)));
  } else {
    decode_->Drain();
    reply.set_transfers(static_cast<uint64_t>(decode_->AwaitIdle(patience)));
  }
  return reply;
}

std::string WorkerRun::MissingPages() const {
  const v1::WorkerLoad load = Load();
  if (load.free_pages() == load.total_pages() &&
      load.free_state_slots() == load.total_state_slots() && load.transfers() == 0 &&
      load.active_sequences() == 0) {
    return "";
  }
  return absl::StrCat(address_, ": ", load.ShortDebugString());
}

}  // namespace isthmus::sim
