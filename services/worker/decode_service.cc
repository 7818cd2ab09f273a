// SPDX-License-Identifier: Apache-2.0
#include "services/worker/decode_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/receiver.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/rpc/status.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

constexpr size_t kTransferIdBytes = 16;

absl::Status GoneReservation() {
  return WithFaultScope(
      absl::AbortedError("transfer_id: no such reservation (any more); its lease may be over"),
      FaultScope::kRequest);
}

engine::SamplingParams SamplingOf(const v1::HandoffCall& call) {
  const v1::SamplerState& state = call.handoff().sampler();
  engine::SamplingParams params;
  params.temperature = static_cast<float>(state.temperature());
  params.top_p = static_cast<float>(state.top_p());
  params.top_k = static_cast<int32_t>(std::min<uint32_t>(state.top_k(), INT32_MAX));
  params.seed = state.seed();
  params.max_tokens = static_cast<int64_t>(call.max_output_tokens());
  return params;
}

}  // namespace

absl::Status DecodeService::CheckReserve(const v1::ReserveCall& call) const {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  if (call.transfer_id().size() != kTransferIdBytes) {
    return absl::InvalidArgumentError(absl::StrCat("transfer_id: has ", call.transfer_id().size(),
                                                   " bytes, want ", kTransferIdBytes));
  }
  const uint64_t limit = worker_->card().values().max_sequence_tokens();
  if (call.num_prompt_tokens() == 0 || call.num_prompt_tokens() >= limit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_prompt_tokens: is ", call.num_prompt_tokens(), ", want 1 to ", limit - 1));
  }
  if (call.max_output_tokens() == 0 ||
      call.max_output_tokens() > limit - call.num_prompt_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat("max_output_tokens: is ",
                                                   call.max_output_tokens(), ", want 1 to ",
                                                   limit - call.num_prompt_tokens()));
  }
  if (streams_.Find(call.router_incarnation()) == nullptr) {
    return WithFaultScope(absl::FailedPreconditionError(absl::StrFormat(
                              "router_incarnation: router %016x has no token stream here",
                              call.router_incarnation())),
                          FaultScope::kPeer);
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::KvReservation> DecodeService::Reserve(const v1::ReserveCall& call) {
  ISTHMUS_RETURN_IF_ERROR(CheckReserve(call));
  Sweep();
  MutexLock lock(mutex_);
  if (is_draining_) {
    return WithFaultScope(absl::UnavailableError("this worker is draining"), FaultScope::kPeer);
  }
  const auto known = transfers_.find(call.transfer_id());
  if (known != transfers_.end()) return known->second->reservation;

  auto transfer = std::make_shared<Transfer>();
  transfer->call = call;
  ISTHMUS_ASSIGN_OR_RETURN(transfer->cache, worker_->pool().Open());
  // Room for the whole sequence now: it cannot run out of pages later.
  ISTHMUS_RETURN_IF_ERROR(transfer->cache.Reserve(
      static_cast<int64_t>(call.num_prompt_tokens() + call.max_output_tokens())));
  v1::KvReservation& reservation = transfer->reservation;
  reservation.set_transfer_id(call.transfer_id());
  reservation.set_worker_incarnation(worker_->identity().worker_incarnation);
  reservation.set_layout_fingerprint(worker_->identity().layout_fingerprint);
  DescribePages(worker_->pool(), transfer->cache, static_cast<int64_t>(call.num_prompt_tokens()),
                worker_->card().transfer().regions(0).generation(), &reservation);
  const absl::Duration lease = worker_->config().reservation_lease;
  reservation.mutable_lease()->set_seconds(absl::ToInt64Seconds(lease));
  reservation.mutable_lease()->set_nanos(static_cast<int32_t>(
      absl::ToInt64Nanoseconds(lease - absl::Seconds(absl::ToInt64Seconds(lease)))));
  transfer->expires = worker_->clock().Now() + lease;
  transfers_.emplace(call.transfer_id(), transfer);
  return reservation;
}

absl::StatusOr<uint64_t> DecodeService::Verify(const v1::HandoffCall& call, Transfer& transfer) {
  const v1::KvHandoff& handoff = call.handoff();
  ISTHMUS_RETURN_IF_ERROR(
      transfer::CheckHandoff(handoff, transfer.reservation, worker_->identity()));
  const uint64_t reserved = transfer.call.num_prompt_tokens();
  if (handoff.num_prompt_tokens() != reserved ||
      static_cast<uint64_t>(call.prompt_token_ids_size()) != reserved) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_prompt_tokens: ", reserved, " are reserved, the handoff has ",
                     handoff.num_prompt_tokens(), ", the call has ", call.prompt_token_ids_size()));
  }
  if (call.max_output_tokens() == 0 ||
      call.max_output_tokens() > transfer.call.max_output_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat("max_output_tokens: is ",
                                                   call.max_output_tokens(), ", want 1 to ",
                                                   transfer.call.max_output_tokens()));
  }
  const std::vector<transfer::ExpectedGroup> groups =
      GroupsOf(worker_->pool(), transfer.cache, static_cast<int64_t>(reserved));
  return transfer::VerifyGroups(handoff, groups, [&](const transfer::ExpectedGroup& group) {
    return DigestOf(handoff.transfer_id(), group);
  });
}

absl::StatusOr<v1::HandoffReply> DecodeService::Handoff(const v1::HandoffCall& call) {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  const std::string& transfer_id = call.handoff().transfer_id();
  std::shared_ptr<Transfer> transfer;
  v1::HandoffReply reply;
  {
    MutexLock lock(mutex_);
    const auto found = transfers_.find(transfer_id);
    if (found == transfers_.end()) {
      metrics_->Add(kHandoffRefusals, 1);
      return GoneReservation();
    }
    transfer = found->second;
    if (transfer->state == Transfer::State::kRunning) {
      reply.set_digests_verified(transfer->digests_verified);
      return reply;  // A repeated call.
    }
    if (transfer->state == Transfer::State::kAdmitting) {
      return absl::AbortedError("transfer_id: another handoff of it is being verified");
    }
    transfer->state = Transfer::State::kAdmitting;
  }
  const absl::StatusOr<uint64_t> verified = Verify(call, *transfer);
  absl::Status status = verified.status();
  if (status.ok()) {
    transfer->digests_verified = *verified;
    status = Admit(call, transfer);
  }
  if (!status.ok()) {
    metrics_->Add(kHandoffRefusals, 1);
    LogWarning("refused a handoff",
               {{"request_id", call.request_id()}, {"status", status.ToString()}});
    MutexLock lock(mutex_);
    if (transfer->cache.is_open()) Quarantine(std::move(transfer->cache));
    transfers_.erase(transfer_id);
    removed_.notify_all();
    return status;
  }
  metrics_->Add(kVerifiedGroups, static_cast<double>(*verified));
  reply.set_digests_verified(*verified);
  return reply;
}

absl::Status DecodeService::Admit(const v1::HandoffCall& call,
                                  const std::shared_ptr<Transfer>& transfer) {
  const v1::KvHandoff& handoff = call.handoff();
  const v1::ClusterValues& values = worker_->card().values();
  std::shared_ptr<TokenQueue> queue = streams_.Find(transfer->call.router_incarnation());
  if (queue == nullptr) return absl::CancelledError("the router's token stream has ended");
  engine::Sequence sequence;
  sequence.request_id = call.request_id();
  sequence.tokens.assign(call.prompt_token_ids().begin(), call.prompt_token_ids().end());
  sequence.num_prompt_tokens = static_cast<int64_t>(handoff.num_prompt_tokens());
  sequence.sampling = SamplingOf(call);
  ISTHMUS_RETURN_IF_ERROR(worker_->engine().Validate(sequence.tokens, sequence.sampling));
  if (handoff.first_token() >= values.vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat("first_token: is ", handoff.first_token(),
                                                   ", the vocabulary has ", values.vocab_size()));
  }
  sequence.tokens.push_back(static_cast<int32_t>(handoff.first_token()));
  sequence.num_draws = handoff.sampler().num_draws();
  ISTHMUS_RETURN_IF_ERROR(transfer->cache.SetNumTokens(sequence.num_prompt_tokens));
  if (handoff.first_token() == values.end_token_id()) {
    sequence.finish = engine::FinishReason::kStop;
  } else if (sequence.sampling.max_tokens == 1) {
    sequence.finish = engine::FinishReason::kLength;
  }
  {
    MutexLock lock(mutex_);
    if (*transfer->is_cancelled) return absl::CancelledError("cancelled before it was admitted");
    sequence.cache = std::move(transfer->cache);
    transfer->state = Transfer::State::kRunning;
  }
  if (sequence.is_finished()) {
    EndSequence(handoff.transfer_id(), std::move(sequence), absl::OkStatus(), *queue);
    return absl::OkStatus();
  }
  return worker_->loop().Submit(
      EntryOf(handoff.transfer_id(), std::move(sequence), queue, transfer->is_cancelled));
}

StepLoop::Entry DecodeService::EntryOf(const std::string& transfer_id, engine::Sequence sequence,
                                       const std::shared_ptr<TokenQueue>& queue,
                                       const CancelFlag& is_cancelled) {
  StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_cancelled = is_cancelled;
  entry.on_token = [this, transfer_id, queue](const engine::Sequence& running) {
    metrics_->Add(kOutputTokens, 1);
    if (running.is_finished()) return true;  // The last token leaves when the pages are free.
    v1::SequenceTokens tokens;
    tokens.set_transfer_id(transfer_id);
    tokens.set_first_index(static_cast<uint64_t>(running.num_output_tokens() - 1));
    tokens.add_token_ids(static_cast<uint32_t>(running.tokens.back()));
    return queue->TryPush(std::move(tokens));
  };
  entry.on_end = [this, transfer_id, queue](engine::Sequence ended, const absl::Status& status) {
    EndSequence(transfer_id, std::move(ended), status, *queue);
  };
  return entry;
}

void DecodeService::EndSequence(const std::string& transfer_id, engine::Sequence sequence,
                                const absl::Status& status, TokenQueue& queue) {
  v1::SequenceTokens tokens;
  tokens.set_transfer_id(transfer_id);
  const auto num_output = static_cast<uint64_t>(sequence.num_output_tokens());
  tokens.set_first_index(num_output);
  if (status.ok() && sequence.is_finished()) {
    tokens.set_end(sequence.finish == engine::FinishReason::kStop ? v1::SEQUENCE_END_STOP
                                                                  : v1::SEQUENCE_END_LENGTH);
    if (num_output > 1) {  // The first output token came with the handoff.
      tokens.set_first_index(num_output - 1);
      tokens.add_token_ids(static_cast<uint32_t>(sequence.tokens.back()));
    }
  } else {
    const absl::Status error =
        status.ok() ? absl::ResourceExhaustedError("the router does not read its tokens") : status;
    tokens.set_end(v1::SEQUENCE_END_FAILED);
    *tokens.mutable_error() = rpc::ToWorkerError(error);
    LogWarning("a sequence ended early",
               {{"request_id", sequence.request_id}, {"status", error.ToString()}});
  }
  sequence.cache = kv::SequenceCache();
  Remove(transfer_id);
  // A router whose stream is full or closed will not miss it.
  queue.TryPush(std::move(tokens));
}

void DecodeService::Remove(const std::string& transfer_id) {
  MutexLock lock(mutex_);
  transfers_.erase(transfer_id);
  removed_.notify_all();
}

void DecodeService::Quarantine(kv::SequenceCache cache) {
  quarantine_.push_back(
      {std::move(cache), worker_->clock().Now() + worker_->config().quarantine_time});
}

absl::StatusOr<v1::CancelReply> DecodeService::Cancel(const v1::CancelCall& call,
                                                      absl::Duration timeout) {
  v1::CancelReply reply;
  MutexLock lock(mutex_);
  const auto found = transfers_.find(call.transfer_id());
  if (found == transfers_.end()) return reply;
  reply.set_was_known(true);
  const std::shared_ptr<Transfer> transfer = found->second;
  LogInfo("cancelled a sequence", {{"request_id", call.request_id()}, {"reason", call.reason()}});
  if (transfer->state == Transfer::State::kReserved) {
    if (!call.writer_is_done()) Quarantine(std::move(transfer->cache));
    transfers_.erase(found);
    return reply;
  }
  *transfer->is_cancelled = true;
  const bool is_removed = removed_.wait_for(lock, absl::ToChronoMilliseconds(timeout), [&] {
    return transfers_.find(call.transfer_id()) == transfers_.end();
  });
  if (is_removed) return reply;
  return absl::DeadlineExceededError(
      absl::StrCat("the sequence's step did not end within ", absl::FormatDuration(timeout)));
}

v1::DrainReply DecodeService::Drain() {
  v1::DrainReply reply;
  MutexLock lock(mutex_);
  is_draining_ = true;
  reply.set_transfers(transfers_.size());
  return reply;
}

absl::StatusOr<std::shared_ptr<TokenQueue>> DecodeService::OpenStream(
    const v1::TokensHello& hello) {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  const uint64_t own = worker_->identity().worker_incarnation;
  if (hello.worker_incarnation() != own) {
    return WithFaultScope(
        absl::AbortedError(absl::StrFormat("the hello is for incarnation %016x, this worker is "
                                           "%016x",
                                           hello.worker_incarnation(), own)),
        FaultScope::kPeer);
  }
  return streams_.Open(hello.router_incarnation());
}

void DecodeService::CloseStream(uint64_t router_incarnation) {
  streams_.Close(router_incarnation);
  MutexLock lock(mutex_);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it->second;
    if (transfer.call.router_incarnation() != router_incarnation) {
      ++it;
    } else if (transfer.state == Transfer::State::kReserved) {
      Quarantine(std::move(transfer.cache));
      it = transfers_.erase(it);
    } else {
      *transfer.is_cancelled = true;
      ++it;
    }
  }
}

void DecodeService::Sweep() {
  const absl::Time now = worker_->clock().Now();
  MutexLock lock(mutex_);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it->second;
    if (transfer.state != Transfer::State::kReserved || now < transfer.expires) {
      ++it;
      continue;
    }
    metrics_->Add(kExpiredLeases, 1);
    LogWarning("a reservation's lease is over", {{"request_id", transfer.call.request_id()}});
    Quarantine(std::move(transfer.cache));
    it = transfers_.erase(it);
  }
  std::erase_if(quarantine_, [now](const Quarantined& entry) { return now >= entry.until; });
}

int64_t DecodeService::num_transfers() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(transfers_.size());
}

}  // namespace isthmus::worker
