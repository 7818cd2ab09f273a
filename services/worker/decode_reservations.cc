// SPDX-License-Identifier: Apache-2.0
// Reservations: pages set aside, leases, quarantine.
#include "services/worker/decode_service.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/log.h"
#include "services/base/request_limits.h"
#include "services/base/status_macros.h"
#include "services/engine/prefix_reuse.h"
#include "services/rpc/wire.h"
#include "services/worker/call_checks.h"
#include "services/worker/page_groups.h"
#include "services/worker/worker_metrics.h"

namespace isthmus::worker {

// Several replies run beside each other, so that all of them must fit into an empty cache.
absl::Status DecodeService::CheckRepliesFit(const v1::ReserveCall& call) const {
  if (call.num_replies() <= 1) return absl::OkStatus();
  kv::CachePool& pool = worker_->pool();
  const auto num_prompt_tokens = static_cast<int64_t>(call.num_prompt_tokens());
  const auto num_output_tokens = static_cast<int64_t>(call.max_output_tokens());
  const int64_t own_tokens = num_prompt_tokens % pool.layout().geometry.page_tokens;
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const auto kind = static_cast<kernels::CacheKindIndex>(k);
    const int64_t wanted =
        pool.layout().PagesFor(kind, num_prompt_tokens + num_output_tokens) +
        (call.num_replies() - 1) * pool.layout().PagesFor(kind, own_tokens + num_output_tokens);
    const int64_t all = pool.pages(kind).num_pages();
    if (wanted <= all) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("num_replies: ", call.num_replies(), " replies of up to ", num_output_tokens,
                     " tokens want ", wanted, " pages of ", pool.layout().kinds[kind].name,
                     " at one time, this worker has ", all));
  }
  return absl::OkStatus();
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
  // What never fits must not be waited for.
  const auto most_replies =
      std::min<uint64_t>(kMaxReplies, static_cast<uint64_t>(worker_->pool().slots().num_pages()));
  if (call.num_replies() > most_replies) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_replies: is ", call.num_replies(), ", want at most ", most_replies));
  }
  ISTHMUS_RETURN_IF_ERROR(CheckRepliesFit(call));
  if (static_cast<uint64_t>(call.prompt_token_ids_size()) != call.num_prompt_tokens()) {
    return absl::InvalidArgumentError(absl::StrCat("prompt_token_ids: has ",
                                                   call.prompt_token_ids_size(), " ids, want ",
                                                   call.num_prompt_tokens()));
  }
  return CheckCacheSalt(call.cache_salt());
}

// Pages for the prompt and one token, if the whole reply is expected to find room; more come as the
// reply grows. Pages that hold the start of the prompt already are held first: they need no room.
absl::Status DecodeService::TakeRoom(std::vector<int32_t> prompt, Transfer& transfer) {
  const v1::ReserveCall& call = transfer.call;
  kv::CachePool& pool = worker_->pool();
  engine::Sequence sequence;
  sequence.tokens = std::move(prompt);
  sequence.num_prompt_tokens = static_cast<int64_t>(call.num_prompt_tokens());
  sequence.cache_salt = call.cache_salt();
  kv::PrefixHit found = engine::FindPages(pool, sequence);
  const int64_t held_tokens = found.num_tokens;
  ISTHMUS_ASSIGN_OR_RETURN(transfer.replies[0].claim,
                           worker_->admission().Admit(
                               {.num_prompt_tokens = sequence.num_prompt_tokens,
                                .max_output_tokens = static_cast<int64_t>(call.max_output_tokens()),
                                .urgency = transfer.urgency,
                                .num_replies = static_cast<int64_t>(transfer.replies.size()),
                                .num_shared_tokens = held_tokens,
                                .ask_id = call.ask_id(),
                                .request_id = call.request_id()}));
  ISTHMUS_RETURN_IF_ERROR(
      engine::OpenWithPages(pool, sequence.num_prompt_tokens + 1, std::move(found), sequence));
  transfer.reservation.set_held_tokens(static_cast<uint64_t>(held_tokens));
  transfer.cache = std::move(sequence.cache);
  transfer.prompt = std::move(sequence.tokens);
  transfer.prefix = std::move(sequence.prefix);
  if (pool.prefixes() != nullptr) {
    pool.prefixes()->CountQuery(sequence.num_prompt_tokens, held_tokens);
  }
  return absl::OkStatus();
}

// Room for what further replies do not share: the end of the prompt behind its last full page, one
// token, and their state slots.
absl::Status DecodeService::OpenForks(Transfer& transfer) {
  const auto num_prompt_tokens = static_cast<int64_t>(transfer.call.num_prompt_tokens());
  const int64_t own_tokens = num_prompt_tokens % worker_->pool().layout().geometry.page_tokens;
  for (size_t i = 1; i < transfer.replies.size(); ++i) {
    Reply& reply = transfer.replies[i];
    reply.claim = transfer.replies[0].claim.Fork();
    ISTHMUS_ASSIGN_OR_RETURN(reply.cache, worker_->pool().Open());
    ISTHMUS_RETURN_IF_ERROR(reply.cache.Reserve(own_tokens + 1));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::KvReservation> DecodeService::Reserve(const v1::ReserveCall& call) {
  ISTHMUS_RETURN_IF_ERROR(CheckReserve(call));
  ISTHMUS_ASSIGN_OR_RETURN(std::vector<int32_t> prompt, TokensOf(call.prompt_token_ids()));
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
  transfer->call.clear_prompt_token_ids();
  transfer->urgency = rpc::UrgencyOf(call, worker_->clock().Now());
  transfer->replies.resize(std::max(1u, call.num_replies()));
  ISTHMUS_RETURN_IF_ERROR(TakeRoom(std::move(prompt), *transfer));
  ISTHMUS_RETURN_IF_ERROR(OpenForks(*transfer));
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

}  // namespace isthmus::worker
