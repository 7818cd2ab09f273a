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
#include "services/rpc/wire.h"
#include "services/worker/call_checks.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {
namespace {

absl::Status GoneReservation() {
  return WithFaultScope(
      absl::AbortedError("transfer_id: no such reservation (any more); its lease may be over"),
      FaultScope::kRequest);
}

int64_t NumPages(const kv::SequenceCache& cache) {
  int64_t count = 0;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    count += static_cast<int64_t>(cache.pages(static_cast<kernels::CacheKindIndex>(k)).size());
  }
  return count;
}

}  // namespace

DecodeService::DecodeService(Worker* worker, rpc::MetricsExporter* metrics)
    : worker_(worker),
      metrics_(metrics),
      streams_(static_cast<size_t>(worker->config().max_unread_messages), worker->clock()),
      sweeper_(worker->clock(), [this] { RunSweeper(); }) {}

DecodeService::~DecodeService() { Stop(); }

void DecodeService::Stop() {
  streams_.CloseAll();
  {
    MutexLock lock(mutex_);
    stops_ = true;
    sweep_changed_.notify_all();
  }
  sweeper_.Join();
}

absl::Status DecodeService::CheckReserve(const v1::ReserveCall& call) const {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  ISTHMUS_RETURN_IF_ERROR(CheckTransferId(call.transfer_id()));
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
  return absl::OkStatus();
}

absl::StatusOr<v1::KvReservation> DecodeService::Reserve(const v1::ReserveCall& call) {
  ISTHMUS_RETURN_IF_ERROR(CheckReserve(call));
  MutexLock lock(mutex_);
  SweepAt(worker_->clock().Now());
  const auto known = transfers_.find(call.transfer_id());
  if (known != transfers_.end()) return known->second->reservation;
  if (is_draining_) return Draining();
  if (past_.Contains(call.transfer_id())) {
    return absl::AbortedError("transfer_id: this transfer has ended here already");
  }
  // Under the lock: the end of a stream ends its transfers under it, and must not miss this one.
  if (streams_.Find(call.router_incarnation()) == nullptr) {
    return WithFaultScope(absl::UnavailableError(absl::StrFormat(
                              "router_incarnation: router %016x has no token stream here",
                              call.router_incarnation())),
                          FaultScope::kPeer);
  }

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
  rpc::ToWire(lease, reservation.mutable_lease());
  transfer->expires = worker_->clock().Now() + lease;
  transfers_.emplace(call.transfer_id(), transfer);
  SweepBy(transfer->expires);
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
  std::vector<transfer::ExpectedGroup> groups =
      GroupsOf(worker_->pool(), transfer.cache, static_cast<int64_t>(reserved));
  PageStaging* const staging = worker_->staging();
  if (staging != nullptr) {  // The bytes have landed in the mirrors.
    for (transfer::ExpectedGroup& group : groups) {
      group.bytes = {staging->MirrorOf(group.bytes.data()), group.bytes.size()};
    }
  }
  ISTHMUS_ASSIGN_OR_RETURN(
      const uint64_t verified,
      transfer::VerifyGroups(handoff, groups, [&](const transfer::ExpectedGroup& group) {
        return DigestOf(handoff.transfer_id(), group);
      }));
  if (staging != nullptr) {
    ISTHMUS_RETURN_IF_ERROR(staging->CopyUp(transfer.cache, static_cast<int64_t>(reserved)));
  }
  return verified;
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
    Refuse(call, *transfer, status);
    return status;
  }
  metrics_->Add(kVerifiedGroups, static_cast<double>(*verified));
  reply.set_digests_verified(*verified);
  return reply;
}

void DecodeService::Refuse(const v1::HandoffCall& call, Transfer& transfer,
                           const absl::Status& status) {
  metrics_->Add(kHandoffRefusals, 1);
  LogWarning("refused a handoff",
             {{"request_id", call.request_id()}, {"status", status.ToString()}});
  MutexLock lock(mutex_);
  // A handoff that is not what it should be is no proof that its writer has ended.
  if (transfer.cache.is_open()) Quarantine(transfer);
  const auto entry = transfers_.find(transfer.call.transfer_id());
  if (entry != transfers_.end()) Erase(entry);
}

absl::StatusOr<engine::Sequence> DecodeService::SequenceOf(const v1::HandoffCall& call,
                                                           Transfer& transfer) {
  const v1::KvHandoff& handoff = call.handoff();
  const v1::ClusterValues& values = worker_->card().values();
  engine::Sequence sequence;
  sequence.request_id = call.request_id();
  ISTHMUS_ASSIGN_OR_RETURN(sequence.tokens, TokensOf(call.prompt_token_ids()));
  sequence.num_prompt_tokens = static_cast<int64_t>(handoff.num_prompt_tokens());
  sequence.sampling = SamplingOf(handoff.sampler());
  sequence.sampling.max_tokens = static_cast<int64_t>(call.max_output_tokens());
  ISTHMUS_RETURN_IF_ERROR(worker_->engine().Validate(sequence.tokens, sequence.sampling));
  if (handoff.first_token() >= values.vocab_size()) {
    return absl::InvalidArgumentError(absl::StrCat("first_token: is ", handoff.first_token(),
                                                   ", the vocabulary has ", values.vocab_size()));
  }
  sequence.tokens.push_back(static_cast<int32_t>(handoff.first_token()));
  sequence.num_draws = handoff.sampler().num_draws();
  if (sequence.sampling.wants_logits_digests) {
    sequence.logits_crc32c.push_back(handoff.first_logits_crc32c());
  }
  ISTHMUS_RETURN_IF_ERROR(transfer.cache.SetNumTokens(sequence.num_prompt_tokens));
  if (handoff.first_token() == values.end_token_id()) {
    sequence.finish = engine::FinishReason::kStop;
  } else if (sequence.sampling.max_tokens == 1) {
    sequence.finish = engine::FinishReason::kLength;
  }
  return sequence;
}

absl::Status DecodeService::Admit(const v1::HandoffCall& call,
                                  const std::shared_ptr<Transfer>& transfer) {
  ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence, SequenceOf(call, *transfer));
  std::shared_ptr<TokenQueue> queue;
  {
    MutexLock lock(mutex_);
    queue = streams_.Find(transfer->call.router_incarnation());
    if (queue == nullptr) return absl::CancelledError("the router's token stream has ended");
    if (*transfer->is_cancelled) return absl::CancelledError("cancelled before it was admitted");
    sequence.cache = std::move(transfer->cache);
    transfer->state = Transfer::State::kRunning;
  }
  if (sequence.is_finished()) {
    EndSequence(*transfer, std::move(sequence), absl::OkStatus(), *queue);
    return absl::OkStatus();
  }
  return worker_->loop().Submit(EntryOf(transfer, std::move(sequence), queue));
}

StepLoop::Entry DecodeService::EntryOf(const std::shared_ptr<Transfer>& transfer,
                                       engine::Sequence sequence,
                                       const std::shared_ptr<TokenQueue>& queue) {
  StepLoop::Entry entry;
  entry.sequence = std::move(sequence);
  entry.is_cancelled = transfer->is_cancelled;
  entry.on_step = [this, transfer, queue](const engine::Sequence& running, int64_t num_gained) {
    metrics_->Add(kOutputTokens, static_cast<double>(num_gained));
    if (running.is_finished()) return true;  // The last tokens leave when the pages are free.
    if (!streams_.HasRoom(*queue)) return false;
    v1::SequenceTokens message;
    SendTokens(*transfer, running, &message);
    return queue->TryPush(std::move(message));
  };
  entry.on_end = [this, transfer, queue](engine::Sequence ended, const absl::Status& status) {
    EndSequence(*transfer, std::move(ended), status, *queue);
  };
  return entry;
}

void DecodeService::SendTokens(Transfer& transfer, const engine::Sequence& sequence,
                               v1::SequenceTokens* message) const {
  message->set_transfer_id(transfer.call.transfer_id());
  message->set_first_index(static_cast<uint64_t>(transfer.num_sent));
  for (; transfer.num_sent < sequence.num_output_tokens(); ++transfer.num_sent) {
    const auto index = static_cast<size_t>(sequence.num_prompt_tokens + transfer.num_sent);
    message->add_token_ids(static_cast<uint32_t>(sequence.tokens[index]));
    if (!sequence.sampling.wants_logits_digests) continue;
    message->add_logits_crc32c(sequence.logits_crc32c[static_cast<size_t>(transfer.num_sent)]);
  }
}

void DecodeService::EndSequence(Transfer& transfer, engine::Sequence sequence,
                                const absl::Status& status, TokenQueue& queue) {
  v1::SequenceTokens message;
  if (status.ok() && sequence.is_finished()) {
    SendTokens(transfer, sequence, &message);
    message.set_end(sequence.finish == engine::FinishReason::kStop ? v1::SEQUENCE_END_STOP
                                                                   : v1::SEQUENCE_END_LENGTH);
  } else {
    const absl::Status error =
        status.ok() ? absl::ResourceExhaustedError("the router does not read its tokens") : status;
    message.set_transfer_id(transfer.call.transfer_id());
    message.set_first_index(static_cast<uint64_t>(transfer.num_sent));
    message.set_end(v1::SEQUENCE_END_FAILED);
    *message.mutable_error() = rpc::ToWorkerError(error);
    metrics_->Add(kEarlyEnds, 1, {absl::StatusCodeToString(error.code())});
    LogWarning("a sequence ended early",
               {{"request_id", sequence.request_id}, {"status", error.ToString()}});
  }
  // Its handoff was in order, so its writer has ended: the pages may be used again at once.
  sequence.cache = kv::SequenceCache();
  {
    MutexLock lock(mutex_);
    const auto entry = transfers_.find(transfer.call.transfer_id());
    if (entry != transfers_.end()) Erase(entry);
  }
  // A router must learn of every end: without room for it, by the end of its stream.
  if (!queue.TryPush(std::move(message))) queue.Close();
}

// Under mutex_.
DecodeService::Transfers::iterator DecodeService::Erase(Transfers::iterator entry) {
  past_.Add(entry->first, false);
  changed_.notify_all();
  return transfers_.erase(entry);
}

// Under mutex_.
void DecodeService::Quarantine(Transfer& transfer) {
  const absl::Time last_start = std::max(worker_->clock().Now(), transfer.expires);
  const absl::Time until = last_start + worker_->config().quarantine_time;
  quarantine_[transfer.call.transfer_id()] = {std::move(transfer.cache), until};
  SweepBy(until);
}

absl::StatusOr<v1::CancelReply> DecodeService::Cancel(const v1::CancelCall& call,
                                                      absl::Duration timeout) {
  ISTHMUS_RETURN_IF_ERROR(worker_->CheckRole(v1::WORKER_ROLE_DECODE));
  ISTHMUS_RETURN_IF_ERROR(CheckTransferId(call.transfer_id()));
  v1::CancelReply reply;
  MutexLock lock(mutex_);
  const auto found = transfers_.find(call.transfer_id());
  if (found != transfers_.end()) {
    reply.set_was_known(true);
    LogInfo("cancelled a sequence", {{"request_id", call.request_id()}, {"reason", call.reason()}});
    if (found->second->state == Transfer::State::kReserved) {
      if (!call.writer_is_done()) Quarantine(*found->second);
      Erase(found);
    } else {
      *found->second->is_cancelled = true;
      const bool has_ended = worker_->clock().WaitFor(
          changed_, lock, timeout, [&] { return transfers_.count(call.transfer_id()) == 0; });
      if (!has_ended) {
        return absl::DeadlineExceededError(
            absl::StrCat("the sequence's step did not end within ", absl::FormatDuration(timeout)));
      }
    }
  }
  past_.Add(call.transfer_id(), false);
  if (call.writer_is_done() && quarantine_.erase(call.transfer_id()) > 0) {
    reply.set_was_known(true);
  }
  return reply;
}

void DecodeService::Drain() {
  MutexLock lock(mutex_);
  is_draining_ = true;
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
  const bool had_another = streams_.Find(hello.router_incarnation()) != nullptr;
  ISTHMUS_ASSIGN_OR_RETURN(std::shared_ptr<TokenQueue> queue,
                           streams_.Open(hello.router_incarnation()));
  // What ran on the earlier stream has lost its reader; nothing can be on this one yet.
  if (had_another) EndTransfersOf(hello.router_incarnation());
  return queue;
}

void DecodeService::CloseStream(uint64_t router_incarnation,
                                const std::shared_ptr<TokenQueue>& queue) {
  if (streams_.Close(router_incarnation, queue)) EndTransfersOf(router_incarnation);
}

void DecodeService::EndTransfersOf(uint64_t router_incarnation) {
  MutexLock lock(mutex_);
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it->second;
    if (transfer.call.router_incarnation() != router_incarnation) {
      ++it;
    } else if (transfer.state == Transfer::State::kReserved) {
      Quarantine(transfer);
      it = Erase(it);
    } else {
      *transfer.is_cancelled = true;
      ++it;
    }
  }
}

void DecodeService::Sweep() {
  MutexLock lock(mutex_);
  SweepAt(worker_->clock().Now());
}

// Under mutex_.
void DecodeService::SweepAt(absl::Time now) {
  for (auto it = transfers_.begin(); it != transfers_.end();) {
    Transfer& transfer = *it->second;
    if (transfer.state != Transfer::State::kReserved || now < transfer.expires) {
      ++it;
      continue;
    }
    metrics_->Add(kExpiredLeases, 1);
    LogWarning("a reservation's lease is over", {{"request_id", transfer.call.request_id()}});
    Quarantine(transfer);
    it = Erase(it);
  }
  std::erase_if(quarantine_, [now](const auto& entry) { return now >= entry.second.until; });
}

// Under mutex_. When something expires next.
absl::Time DecodeService::NextDue() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [transfer_id, transfer] : transfers_) {
    if (transfer->state == Transfer::State::kReserved) next = std::min(next, transfer->expires);
  }
  for (const auto& [transfer_id, entry] : quarantine_) next = std::min(next, entry.until);
  return next;
}

// Under mutex_.
void DecodeService::SweepBy(absl::Time due) {
  if (due >= sweeps_at_) return;
  sweeps_at_ = due;
  sweep_changed_.notify_all();
}

void DecodeService::RunSweeper() {
  MutexLock lock(mutex_);
  while (!stops_) {
    const absl::Time now = worker_->clock().Now();
    SweepAt(now);
    const absl::Time next = std::min(NextDue(), now + absl::Hours(1));
    sweeps_at_ = next;
    worker_->clock().WaitFor(sweep_changed_, lock, next - now,
                             [&] { return stops_ || sweeps_at_ < next; });
  }
}

int64_t DecodeService::num_transfers() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(transfers_.size());
}

int64_t DecodeService::AwaitIdle(absl::Duration patience) {
  MutexLock lock(mutex_);
  worker_->clock().WaitFor(changed_, lock, patience, [this] { return transfers_.empty(); });
  return static_cast<int64_t>(transfers_.size());
}

void DecodeService::AddLoad(v1::WorkerLoad* load) const {
  MutexLock lock(mutex_);
  load->set_transfers(load->transfers() + transfers_.size());
  int64_t pages = 0;
  for (const auto& [transfer_id, entry] : quarantine_) pages += NumPages(entry.cache);
  load->set_quarantined_pages(load->quarantined_pages() + static_cast<uint64_t>(pages));
}

}  // namespace isthmus::worker
