// SPDX-License-Identifier: Apache-2.0
#include "router/handoff.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "router/sampling.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"
#include "services/rpc/channel.h"
#include "services/rpc/identity.h"
#include "services/rpc/status.h"
#include "services/rpc/wire.h"

namespace isthmus::router {
namespace {

// How long a client's leaving may go unnoticed while tokens are awaited.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);
// Messages to a client that need not wait for the gather time after a pause.
constexpr int kGatherBurst = 3;

}  // namespace

bool IsWorthAnotherPair(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kCancelled:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
      return false;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kResourceExhausted:
      return true;
    default:
      return FaultScopeOf(status) != FaultScope::kRequest;
  }
}

Attempt::Attempt(const RoutedRequest* request, Placement placement, AttemptSetting setting)
    : request_(request),
      placement_(std::move(placement)),
      setting_(std::move(setting)),
      transfer_id_(rpc::NewTransferId()),
      tokens_(std::make_shared<TokenMailbox>(
          setting_.max_behind_messages * request->sampling.num_replies(), setting_.on_overflow,
          *setting_.clock)) {
  placement_.decode->relay().Subscribe(transfer_id_, tokens_);
}

Attempt::~Attempt() {
  placement_.decode->relay().Unsubscribe(transfer_id_);
  if (!may_be_reserved_ && !may_write_) return;
  CancelJob job;
  job.transfer_id = transfer_id_;
  job.request_id = request_->request_id;
  job.reason = "the request ended before its sequence";
  if (may_write_) job.prefill = placement_.prefill;
  if (may_be_reserved_) job.decode = placement_.decode;
  setting_.canceller->Submit(std::move(job));
}

rpc::CallOptions Attempt::CallTo(const WorkerLink& link) const {
  const absl::Duration left = request_->deadline - setting_.clock->Now();
  // When the decode worker's tokens cannot come any more, neither worker need go on.
  return {rpc::HopTimeout(left, absl::ZeroDuration()), [this, &link] {
            return setting_.is_cancelled() || !link.Standing().ok() || !tokens_->failure().ok();
          }};
}

// Either we ended the call since a worker is not heard of, or its worker did when it stopped.
absl::Status Attempt::WhyCancelled(const absl::Status& status, const WorkerLink& callee) const {
  if (setting_.is_cancelled()) return absl::CancelledError("the client left");
  absl::Status standing = callee.Standing();
  if (!standing.ok()) return standing;
  absl::Status tokens = tokens_->failure();
  if (!tokens.ok()) return tokens;
  return WithFaultScope(absl::UnavailableError(status.message()), FaultScope::kPeer);
}

absl::Status Attempt::Judge(absl::Status status, WorkerLink& callee, bool blames_both) {
  WorkerLink& decode = *placement_.decode;
  if (absl::IsCancelled(status)) {
    status = WhyCancelled(status, callee);
    if (absl::IsCancelled(status)) return status;
    if (callee.Standing().ok() && !tokens_->failure().ok()) {
      blamed_.insert(decode.incarnation());
      return status;
    }
  }
  // A deadline between workers, not the request's.
  if (absl::IsDeadlineExceeded(status) && FaultScopeOf(status) == FaultScope::kPeer) {
    status = WithFaultScope(absl::UnavailableError(status.message()), FaultScope::kPeer);
  }
  blamed_.insert(callee.incarnation());
  if (absl::IsResourceExhausted(status)) return status;
  if (blames_both) blamed_.insert({placement_.prefill->incarnation(), decode.incarnation()});
  if (FaultScopeOf(status) == FaultScope::kPeer) callee.SetFailed(status);
  return status;
}

absl::Status Attempt::Reserve(uint64_t ask_id) {
  v1::ReserveCall call;
  call.set_transfer_id(transfer_id_);
  call.set_request_id(request_->request_id);
  call.set_num_prompt_tokens(request_->prompt.size());
  call.mutable_prompt_token_ids()->Add(request_->prompt.begin(), request_->prompt.end());
  call.set_cache_salt(request_->cache_salt);
  call.set_max_output_tokens(request_->max_output_tokens);
  call.set_router_incarnation(setting_.router_incarnation);
  call.set_num_replies(request_->sampling.num_replies());
  call.set_ask_id(ask_id);
  rpc::SetUrgency(request_->urgency(), setting_.clock->Now(), &call);
  // Before the call: when its answer is lost, the pages are taken all the same.
  may_be_reserved_ = true;
  WorkerLink& decode = *placement_.decode;
  absl::StatusOr<v1::KvReservation> reservation = decode.client().Reserve(call, CallTo(decode));
  if (absl::IsResourceExhausted(reservation.status()) ||
      absl::IsInvalidArgument(reservation.status())) {
    may_be_reserved_ = false;
  }
  if (!reservation.ok()) return Judge(reservation.status(), decode, false);
  reservation_ = *std::move(reservation);
  return absl::OkStatus();
}

absl::StatusOr<v1::KvHandoff> Attempt::Prefill() {
  v1::PrefillCall call;
  call.set_request_id(request_->request_id);
  call.mutable_prompt_token_ids()->Add(request_->prompt.begin(), request_->prompt.end());
  *call.mutable_sampler() = SamplerOf(request_->sampling);
  call.set_cache_salt(request_->cache_salt);
  *call.mutable_reservation() = std::move(reservation_);
  *call.mutable_target() = placement_.decode->card().transfer();
  rpc::SetUrgency(request_->urgency(), setting_.clock->Now(), &call);
  may_write_ = true;
  WorkerLink& prefill = *placement_.prefill;
  absl::StatusOr<v1::PrefillReply> reply = prefill.client().Prefill(call, CallTo(prefill));
  placement_.prefill_charge.Release();
  // After an error that the worker itself gave nothing is written any more, but from here that
  // looks the same as a lost answer.
  may_write_ = !reply.ok();
  if (!reply.ok()) return Judge(reply.status(), prefill, true);
  *prompt_logprobs_.mutable_tokens() = std::move(*reply->mutable_prompt_logprobs());
  return std::move(*reply->mutable_handoff());
}

absl::Status Attempt::Admit(v1::KvHandoff handoff) {
  v1::HandoffCall call;
  ISTHMUS_RETURN_IF_ERROR(TakeFirstTokens(handoff));
  kv_bytes_ = handoff.kv_bytes();
  cached_prompt_tokens_ = handoff.cached_prompt_tokens();
  *call.mutable_handoff() = std::move(handoff);
  call.set_request_id(request_->request_id);
  call.set_max_output_tokens(request_->max_output_tokens);
  call.set_router_incarnation(setting_.router_incarnation);
  WorkerLink& decode = *placement_.decode;
  const absl::StatusOr<v1::HandoffReply> reply = decode.client().Handoff(call, CallTo(decode));
  if (!reply.ok()) return Judge(reply.status(), decode, true);
  digests_verified_ = reply->digests_verified();
  return absl::OkStatus();
}

absl::Status Attempt::TakeFirstTokens(const v1::KvHandoff& handoff) {
  const uint32_t wanted = request_->sampling.num_replies();
  if (static_cast<uint32_t>(handoff.first_tokens_size()) != wanted) {
    return absl::InternalError(absl::StrCat("the handoff has ", handoff.first_tokens_size(),
                                            " first tokens, want ", wanted));
  }
  first_tokens_.clear();
  for (const v1::FirstToken& first : handoff.first_tokens()) {
    v1::SequenceTokens& tokens = first_tokens_.emplace_back();
    tokens.set_reply_index(static_cast<uint32_t>(first_tokens_.size() - 1));
    tokens.add_token_ids(first.token_id());
    if (request_->sampling.wants_logits_digests()) tokens.add_logits_crc32c(first.logits_crc32c());
    if (request_->sampling.has_top_logprobs()) *tokens.add_logprobs() = first.logprobs();
  }
  return absl::OkStatus();
}

absl::Status Attempt::HandOver() {
  ISTHMUS_ASSIGN_OR_RETURN(v1::KvHandoff handoff, Prefill());
  return Admit(std::move(handoff));
}

void Attempt::EndReply(uint32_t reply_index) {
  ended_here_.insert(reply_index);
  std::set<uint32_t> ended = ended_here_;
  ended.insert(ended_there_.begin(), ended_there_.end());
  if (ended.size() == request_->sampling.num_replies()) return;  // With the transfer.
  CancelJob job;
  job.transfer_id = transfer_id_;
  job.request_id = request_->request_id;
  job.reason = "a stop string has ended the reply";
  job.decode = placement_.decode;
  job.reply_index = reply_index;
  setting_.canceller->Submit(std::move(job));
}

// Notes the ends among what has come; what it returns is what the client should hear of.
absl::StatusOr<std::vector<v1::SequenceTokens>> Attempt::Sift(
    std::vector<v1::SequenceTokens> messages) {
  std::vector<v1::SequenceTokens> news;
  for (v1::SequenceTokens& tokens : messages) {
    if (tokens.end() != v1::SEQUENCE_END_UNSPECIFIED) {
      ended_there_.insert(tokens.reply_index());
      if (ended_there_.size() == request_->sampling.num_replies()) may_be_reserved_ = false;
    }
    // Tokens of a reply that was ended here may be on their way for a while.
    if (ended_here_.count(tokens.reply_index()) > 0) continue;
    if (tokens.end() == v1::SEQUENCE_END_FAILED) return rpc::FromWorkerError(tokens.error());
    news.push_back(std::move(tokens));
  }
  return news;
}

absl::StatusOr<std::vector<v1::SequenceTokens>> Attempt::NextTokens() {
  while (true) {
    ISTHMUS_ASSIGN_OR_RETURN(std::vector<v1::SequenceTokens> messages,
                             tokens_->TakeFor(kCancelPoll, next_take_at_));
    if (!messages.empty()) {
      const absl::Duration gather = setting_.gather_time;
      next_take_at_ =
          std::max(next_take_at_, setting_.clock->Now() - kGatherBurst * gather) + gather;
      ISTHMUS_ASSIGN_OR_RETURN(messages, Sift(std::move(messages)));
      if (!messages.empty()) return messages;
    }
    if (setting_.is_cancelled()) return absl::CancelledError("the client left");
    if (setting_.clock->Now() >= request_->deadline) {
      return absl::DeadlineExceededError("the request's deadline has passed");
    }
  }
}

}  // namespace isthmus::router
