// SPDX-License-Identifier: Apache-2.0
#include "services/worker/decode_service.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/worker/call_checks.h"

namespace isthmus::worker {
namespace {

absl::Status StepTakesTooLong(absl::Duration timeout) {
  return absl::DeadlineExceededError(
      absl::StrCat("the sequence's step did not end within ", absl::FormatDuration(timeout)));
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
    const std::shared_ptr<Transfer> transfer = found->second;
    if (call.has_reply_index()) return CancelReply(call.reply_index(), *transfer, lock, timeout);
    if (transfer->state == Transfer::State::kReserved) {
      if (!call.writer_is_done()) Quarantine(*transfer);
      Erase(found);
    } else {
      transfer->CancelAll();
      const bool has_ended = worker_->clock().WaitFor(
          changed_, lock, timeout, [&] { return transfers_.count(call.transfer_id()) == 0; });
      if (!has_ended) return StepTakesTooLong(timeout);
    }
  }
  // Its others may be running.
  if (call.has_reply_index()) return reply;
  past_.Add(call.transfer_id(), false);
  if (call.writer_is_done() && quarantine_.erase(call.transfer_id()) > 0) {
    reply.set_was_known(true);
  }
  return reply;
}

// Under `lock`, which is of mutex_. The transfer goes on while another reply is open.
absl::StatusOr<v1::CancelReply> DecodeService::CancelReply(uint32_t reply_index, Transfer& transfer,
                                                           MutexLock& lock,
                                                           absl::Duration timeout) {
  v1::CancelReply answer;
  if (transfer.state != Transfer::State::kRunning || reply_index >= transfer.replies.size()) {
    return answer;
  }
  Reply& reply = transfer.replies[reply_index];
  answer.set_was_known(reply.is_open);
  *reply.is_cancelled = true;
  const bool has_ended =
      worker_->clock().WaitFor(changed_, lock, timeout, [&] { return !reply.is_open; });
  if (!has_ended) return StepTakesTooLong(timeout);
  return answer;
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
      transfer.CancelAll();
      ++it;
    }
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
