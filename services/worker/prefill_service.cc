// SPDX-License-Identifier: Apache-2.0
#include "services/worker/prefill_service.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/rpc/wire.h"
#include "services/worker/call_checks.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

// How soon a caller's leaving is noticed.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(10);

absl::Status LeaseIsOver(absl::Duration lease, absl::Duration waited) {
  return WithFaultScope(
      absl::AbortedError(absl::StrCat("reservation.lease: is ", absl::FormatDuration(lease), ", ",
                                      absl::FormatDuration(waited),
                                      " have passed; its pages are not written any more")),
      FaultScope::kRequest);
}

// What was drawn and what is told about it.
void Describe(const engine::Sequence& computed, const v1::PrefillCall& call,
              v1::PrefillReply& reply) {
  v1::KvHandoff& handoff = *reply.mutable_handoff();
  *handoff.mutable_sampler() = call.sampler();
  handoff.mutable_sampler()->set_num_draws(computed.num_draws);
  engine::DrawnToken first = {.id = computed.tokens.back()};
  if (!computed.logits_crc32c.empty()) first.logits_crc32c = computed.logits_crc32c.back();
  if (!computed.logprobs.empty()) first.logprobs = computed.logprobs.back();
  const auto add = [&](const engine::DrawnToken& drawn) {
    v1::FirstToken& token = *handoff.add_first_tokens();
    token.set_token_id(static_cast<uint32_t>(drawn.id));
    token.set_logits_crc32c(drawn.logits_crc32c);
    if (!computed.logprobs.empty()) ToWire(drawn.logprobs, token.mutable_logprobs());
  };
  add(first);
  for (const engine::DrawnToken& further : computed.further_first) add(further);
  for (const kernels::TokenLogprobs& logprobs : computed.prompt_logprobs) {
    ToWire(logprobs, reply.add_prompt_logprobs());
  }
}

}  // namespace

// One call, from its registration to its answer.
struct PrefillService::Call {
  CallScope scope;
  absl::Time received;
  absl::Duration lease;
  absl::Time last_write;  // No write starts later.
  int64_t num_prompt_tokens = 0;
  Urgency urgency;
  bool may_land = false;  // Of the call's thread; read once it has ended.
  CancelFlag is_cancelled = std::make_shared<std::atomic<bool>>(false);

  // What the step loop tells the call's thread. It outlives neither.
  struct Progress {
    Mutex mutex;
    CondVar changed;
    int64_t num_cached = 0;                    // Guarded by mutex, as all below.
    std::optional<engine::Sequence> sequence;  // Once it has ended, its cache still held.
    absl::Status status;
  };
  std::shared_ptr<Progress> progress = std::make_shared<Progress>();
};

absl::Status PrefillService::CheckCall(const v1::PrefillCall& call) const {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_PREFILL));
  const v1::KvReservation& reservation = call.reservation();
  ISTHMUS_RETURN_IF_ERROR(CheckTransferId(reservation.transfer_id()));
  ISTHMUS_RETURN_IF_ERROR(CheckLease(reservation));
  ISTHMUS_RETURN_IF_ERROR(CheckCacheSalt(call.cache_salt()));
  if (call.sampler().num_draws() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampler.num_draws: is ", call.sampler().num_draws(), ", want 0"));
  }
  // Before any work: a reservation that cannot be filled must not cost a prefill.
  return transfer::CheckTarget(reservation, call.target(), worker_->identity().layout_fingerprint,
                               worker_->transport().name());
}

absl::StatusOr<std::shared_ptr<PrefillService::Call>> PrefillService::Register(
    const v1::PrefillCall& call, const CallScope& scope) {
  auto state = std::make_shared<Call>();
  state->scope = scope;
  state->received = worker_->clock().Now();
  state->lease = rpc::FromWire(call.reservation().lease());
  // The lease counts from an earlier moment than the one at which this call arrived: the last tenth
  // is left for the reservation's way here.
  state->last_write = state->received + state->lease * 9 / 10;
  state->num_prompt_tokens = call.prompt_token_ids_size();
  state->urgency = rpc::UrgencyOf(call, state->received);
  const std::string& transfer_id = call.reservation().transfer_id();
  MutexLock lock(mutex_);
  if (is_draining_) return Draining();
  if (past_.Contains(transfer_id)) {
    return absl::AbortedError("transfer_id: this transfer has ended here already");
  }
  const auto max_waiting = static_cast<size_t>(worker_->config().max_queued_sequences);
  if (waiting_.size() >= max_waiting) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", max_waiting, " places for waiting prompts are taken"));
  }
  if (!calls_.emplace(transfer_id, state).second) {
    return absl::AbortedError("transfer_id: another call of this transfer is running");
  }
  const auto goes_before = [](const Call* a, const Call* b) {
    return GoesBefore(a->urgency, b->urgency);
  };
  waiting_.insert(std::ranges::upper_bound(waiting_, state.get(), goes_before), state.get());
  changed_.notify_all();
  return state;
}

absl::StatusOr<v1::PrefillReply> PrefillService::Prefill(const v1::PrefillCall& call,
                                                         const CallScope& scope) {
  absl::StatusOr<v1::PrefillReply> reply = Attempt(call, scope);
  if (reply.ok()) return reply;
  metrics_->Add(kPrefillFailures, 1, {absl::StatusCodeToString(reply.status().code())});
  LogWarning("a prefill failed",
             {{"request_id", call.request_id()}, {"status", reply.status().ToString()}});
  return reply;
}

absl::StatusOr<v1::PrefillReply> PrefillService::Attempt(const v1::PrefillCall& call,
                                                         const CallScope& scope) {
  ISTHMUS_RETURN_IF_ERROR(CheckCall(call));
  ISTHMUS_ASSIGN_OR_RETURN(const std::shared_ptr<Call> state, Register(call, scope));
  // The sequence and its pages are gone when Run returns.
  absl::StatusOr<v1::PrefillReply> reply = Run(call, *state);
  MutexLock lock(mutex_);
  std::erase(waiting_, state.get());
  calls_.erase(call.reservation().transfer_id());
  past_.Add(call.reservation().transfer_id(), state->may_land);
  ++num_ended_;
  changed_.notify_all();
  return reply;
}

absl::StatusOr<v1::PrefillReply> PrefillService::Run(const v1::PrefillCall& call, Call& state) {
  ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence admitted, AdmitInTurn(call, state));
  ISTHMUS_ASSIGN_OR_RETURN(PromptPush push, PromptPush::Open(*worker_, call, admitted.cache));
  ISTHMUS_RETURN_IF_ERROR(Submit(std::move(admitted), state));
  absl::StatusOr<engine::Sequence> computed = PushWhileComputing(state, push);
  absl::Status status = computed.status();
  if (status.ok()) status = CheckStillWanted(state);
  if (status.ok()) status = push.PushRest(PushDeadline(state));
  state.may_land = push.may_land();
  ISTHMUS_RETURN_IF_ERROR(status);
  v1::PrefillReply reply;
  v1::KvHandoff& handoff = *reply.mutable_handoff();
  handoff.set_transfer_id(call.reservation().transfer_id());
  handoff.set_worker_incarnation(call.reservation().worker_incarnation());
  handoff.set_layout_fingerprint(worker_->identity().layout_fingerprint);
  handoff.set_num_prompt_tokens(static_cast<uint64_t>(computed->num_prompt_tokens));
  handoff.set_cached_prompt_tokens(static_cast<uint64_t>(computed->num_reused_tokens));
  Describe(*computed, call, reply);
  handoff.set_writer_incarnation(worker_->identity().worker_incarnation);
  push.Describe(&handoff);
  Report(call, push, handoff);
  return reply;
}

absl::StatusOr<engine::Sequence> PrefillService::AdmitInTurn(const v1::PrefillCall& call,
                                                             Call& state) {
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, TokensOf(call.prompt_token_ids()));
  engine::SamplingParams sampling = SamplingOf(call.sampler().sampling());
  // The first token is all that is drawn here, and it may have to be one that ends nothing.
  sampling.max_tokens = std::max<int64_t>(1, sampling.min_tokens);
  ISTHMUS_RETURN_IF_ERROR(worker_->engine().Validate(prompt, sampling));
  MutexLock lock(mutex_);
  while (true) {
    ISTHMUS_RETURN_IF_ERROR(CheckStillWanted(state));
    const bool is_first = waiting_.front() == &state;
    // Calls that do not wait hold pages; when there are none, nothing more will become free.
    const bool is_alone = calls_.size() == waiting_.size();
    if (is_first) {
      absl::StatusOr<engine::Sequence> admitted =
          worker_->engine().Admit(call.request_id(), prompt, sampling, call.cache_salt());
      if (admitted.ok() || is_alone || !absl::IsResourceExhausted(admitted.status())) {
        waiting_.pop_front();
        changed_.notify_all();
        return admitted;
      }
    }
    const uint64_t num_ended = num_ended_;
    const absl::Time now = worker_->clock().Now();
    const absl::Duration patience = state.scope.is_cancelled
                                        ? kCancelPoll
                                        : std::min(state.scope.deadline, state.last_write) - now;
    worker_->clock().WaitFor(changed_, lock, patience, [&] {
      return *state.is_cancelled || num_ended_ != num_ended ||
             (waiting_.front() == &state) != is_first;
    });
  }
}

absl::Status PrefillService::Submit(engine::Sequence sequence, Call& state) {
  StepLoop::Entry entry;
  const std::shared_ptr<Call::Progress> progress = state.progress;
  {
    MutexLock lock(progress->mutex);
    progress->num_cached = sequence.cache.num_tokens();  // Of a prefix hit.
  }
  entry.sequence = std::move(sequence);
  entry.sequence.urgency = state.urgency;
  entry.is_cancelled = state.is_cancelled;
  entry.on_step = [progress](const engine::Sequence& running, int64_t num_gained) {
    MutexLock lock(progress->mutex);
    progress->num_cached = running.cache.num_tokens();
    if (num_gained > 0) return false;  // The end follows at once.
    progress->changed.notify_all();
    return true;
  };
  entry.on_end = [progress](engine::Sequence ended, const absl::Status& status) {
    MutexLock lock(progress->mutex);
    progress->sequence = std::move(ended);
    progress->status = status;
    progress->changed.notify_all();
  };
  return worker_->loop().Submit(std::move(entry));
}

// The loop always ends what it took: at the latest one step after the flag, or when it stops.
absl::StatusOr<engine::Sequence> PrefillService::PushWhileComputing(Call& state, PromptPush& push) {
  Call::Progress& progress = *state.progress;
  absl::Status failure;
  while (true) {
    int64_t num_cached = 0;
    {
      MutexLock lock(progress.mutex);
      const absl::Duration patience =
          state.scope.is_cancelled
              ? kCancelPoll
              : std::min(state.scope.deadline, state.last_write) - worker_->clock().Now();
      // After a failure only the sequence is waited for.
      worker_->clock().WaitFor(progress.changed, lock, failure.ok() ? patience : absl::Minutes(1),
                               [&] {
                                 return progress.sequence.has_value() ||
                                        (failure.ok() && push.HasFull(progress.num_cached));
                               });
      if (progress.sequence.has_value()) {
        engine::Sequence sequence = *std::move(progress.sequence);
        if (failure.ok()) failure = progress.status;
        if (failure.ok()) return sequence;
        const absl::Status reason = CheckStillWanted(state);
        return absl::IsCancelled(failure) && !reason.ok() ? reason : failure;
      }
      num_cached = progress.num_cached;
    }
    if (!failure.ok()) continue;
    failure = CheckStillWanted(state);
    if (failure.ok()) failure = push.PushFull(num_cached, PushDeadline(state));
    if (!failure.ok()) *state.is_cancelled = true;
  }
}

absl::Status PrefillService::CheckStillWanted(const Call& state) const {
  const absl::Time now = worker_->clock().Now();
  if (now >= state.last_write) return LeaseIsOver(state.lease, now - state.received);
  if (now >= state.scope.deadline) {
    return absl::DeadlineExceededError("the call's deadline is over");
  }
  if (*state.is_cancelled || (state.scope.is_cancelled && state.scope.is_cancelled())) {
    return absl::CancelledError("the call was cancelled");
  }
  return absl::OkStatus();
}

absl::Time PrefillService::PushDeadline(const Call& state) const {
  return std::min(state.scope.deadline,
                  worker_->clock().Now() + worker_->config().transfer_timeout);
}

void PrefillService::Report(const v1::PrefillCall& call, const PromptPush& push,
                            const v1::KvHandoff& handoff) {
  const absl::Duration tail = worker_->clock().Now() - push.last_posted();
  metrics_->Add(kPrefills, 1);
  metrics_->Add(kPushedBytes, static_cast<double>(handoff.kv_bytes()));
  metrics_->Observe(kPushSeconds, absl::ToDoubleSeconds(push.write_time()));
  metrics_->Observe(kLastPushSeconds, absl::ToDoubleSeconds(tail));
  LogInfo("pushed a prompt's pages",
          {{"request_id", call.request_id()},
           {"prompt_tokens", handoff.num_prompt_tokens()},
           {"cached_prompt_tokens", handoff.cached_prompt_tokens()},
           {"held_tokens", call.reservation().held_tokens()},
           {"kv_bytes", handoff.kv_bytes()},
           {"push_ms", absl::ToDoubleMilliseconds(push.write_time())},
           {"last_push_ms", absl::ToDoubleMilliseconds(tail)},
           {"last_push_posted_unix_us", absl::ToUnixMicros(push.last_posted())}});
}

absl::StatusOr<v1::CancelReply> PrefillService::Cancel(const v1::CancelCall& call,
                                                       absl::Duration timeout) {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_PREFILL));
  ISTHMUS_RETURN_IF_ERROR(CheckTransferId(call.transfer_id()));
  v1::CancelReply reply;
  MutexLock lock(mutex_);
  const auto found = calls_.find(call.transfer_id());
  if (found != calls_.end()) {
    reply.set_was_known(true);
    LogInfo("cancelled a prefill", {{"request_id", call.request_id()}, {"reason", call.reason()}});
    *found->second->is_cancelled = true;
    changed_.notify_all();
    const bool has_ended = worker_->clock().WaitFor(
        changed_, lock, timeout, [&] { return calls_.count(call.transfer_id()) == 0; });
    if (!has_ended) {
      return absl::DeadlineExceededError(
          absl::StrCat("the call did not end within ", absl::FormatDuration(timeout)));
    }
  }
  // Also when it was not known: the call itself may still be on its way here.
  past_.Add(call.transfer_id(), false);
  if (past_.MayLand(call.transfer_id())) {
    return absl::UnavailableError("a write of this transfer was given up and may still land");
  }
  return reply;
}

void PrefillService::Drain() {
  MutexLock lock(mutex_);
  is_draining_ = true;
}

int64_t PrefillService::num_calls() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(calls_.size());
}

int64_t PrefillService::AwaitIdle(absl::Duration patience) {
  MutexLock lock(mutex_);
  worker_->clock().WaitFor(changed_, lock, patience, [this] { return calls_.empty(); });
  return static_cast<int64_t>(calls_.size());
}

void PrefillService::AddLoad(v1::WorkerLoad* load) const {
  MutexLock lock(mutex_);
  load->set_transfers(load->transfers() + calls_.size());
  load->set_queued_sequences(load->queued_sequences() + waiting_.size());
  int64_t pending = 0;
  for (const auto& [transfer_id, state] : calls_) {
    MutexLock progress_lock(state->progress->mutex);
    pending += state->num_prompt_tokens - state->progress->num_cached;
  }
  load->set_pending_prompt_tokens(load->pending_prompt_tokens() + static_cast<uint64_t>(pending));
}

}  // namespace isthmus::worker
