// SPDX-License-Identifier: Apache-2.0
#include "router/handoff.h"

#include <algorithm>
#include <utility>

#include "services/base/log.h"
#include "services/base/status_macros.h"
#include "services/rpc/channel.h"
#include "services/rpc/identity.h"
#include "services/rpc/status.h"

namespace isthmus::router {
namespace {

constexpr absl::Duration kCancelTimeout = absl::Seconds(10);
constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);

}  // namespace

Attempt::Attempt(const RoutedRequest* request, Placement placement, uint64_t router_incarnation,
                 Clock& clock, std::function<bool()> is_cancelled)
    : request_(request),
      placement_(std::move(placement)),
      router_incarnation_(router_incarnation),
      clock_(clock),
      is_cancelled_(std::move(is_cancelled)),
      transfer_id_(rpc::NewTransferId()),
      tokens_(placement_.decode->relay().Subscribe(transfer_id_)) {}

Attempt::~Attempt() {
  placement_.decode->relay().Unsubscribe(transfer_id_);
  if (!is_reserved_) return;
  v1::CancelCall cancel;
  cancel.set_transfer_id(transfer_id_);
  cancel.set_request_id(request_->request_id);
  cancel.set_reason("the request ended before its sequence");
  cancel.set_writer_is_done(writer_is_done_);
  const auto reply = placement_.decode->client().CancelDecode(cancel, {kCancelTimeout, {}});
  if (reply.ok()) return;
  // The end of our token stream, or the lease, frees the pages then.
  LogWarning("a sequence could not be cancelled",
             {{"request_id", request_->request_id}, {"status", reply.status().ToString()}});
}

rpc::CallOptions Attempt::Call() const {
  const absl::Duration left = request_->deadline - clock_.Now();
  return {rpc::HopTimeout(left, absl::ZeroDuration()), is_cancelled_};
}

absl::StatusOr<v1::KvReservation> Attempt::Reserve() {
  v1::ReserveCall call;
  call.set_transfer_id(transfer_id_);
  call.set_request_id(request_->request_id);
  call.set_num_prompt_tokens(request_->prompt.size());
  call.set_max_output_tokens(request_->max_output_tokens);
  call.set_router_incarnation(router_incarnation_);
  // Before the call: when its answer is lost, the pages are taken all the same.
  is_reserved_ = true;
  absl::StatusOr<v1::KvReservation> reservation = placement_.decode->client().Reserve(call, Call());
  if (reservation.status().code() == absl::StatusCode::kResourceExhausted ||
      reservation.status().code() == absl::StatusCode::kInvalidArgument) {
    is_reserved_ = false;
  }
  return reservation;
}

absl::StatusOr<v1::KvHandoff> Attempt::Prefill(v1::KvReservation reservation) {
  v1::PrefillCall call;
  call.set_request_id(request_->request_id);
  call.mutable_prompt_token_ids()->Add(request_->prompt.begin(), request_->prompt.end());
  *call.mutable_sampler() = request_->sampler;
  *call.mutable_reservation() = std::move(reservation);
  *call.mutable_target() = placement_.decode_card.transfer();
  writer_is_done_ = false;
  absl::StatusOr<v1::KvHandoff> handoff = placement_.prefill->client().Prefill(call, Call());
  writer_is_done_ = handoff.ok();
  return handoff;
}

absl::Status Attempt::HandOver() {
  ISTHMUS_ASSIGN_OR_RETURN(v1::KvReservation reservation, Reserve());
  v1::HandoffCall call;
  ISTHMUS_ASSIGN_OR_RETURN(*call.mutable_handoff(), Prefill(std::move(reservation)));
  call.set_request_id(request_->request_id);
  call.mutable_prompt_token_ids()->Add(request_->prompt.begin(), request_->prompt.end());
  call.set_max_output_tokens(request_->max_output_tokens);
  call.set_router_incarnation(router_incarnation_);
  ISTHMUS_ASSIGN_OR_RETURN(const v1::HandoffReply reply,
                           placement_.decode->client().Handoff(call, Call()));
  first_token_ = call.handoff().first_token();
  kv_bytes_ = call.handoff().kv_bytes();
  digests_verified_ = reply.digests_verified();
  return absl::OkStatus();
}

absl::StatusOr<v1::SequenceTokens> Attempt::NextTokens() {
  while (true) {
    std::optional<v1::SequenceTokens> tokens = tokens_->PopFor(kCancelPoll);
    if (tokens.has_value()) {
      if (tokens->end() != v1::SEQUENCE_END_UNSPECIFIED) is_reserved_ = false;
      if (tokens->end() == v1::SEQUENCE_END_FAILED) return rpc::FromWorkerError(tokens->error());
      return *std::move(tokens);
    }
    if (tokens_->is_closed()) {
      return absl::ResourceExhaustedError("the client reads more slowly than tokens are made");
    }
    if (is_cancelled_()) return absl::CancelledError("the client left");
    if (clock_.Now() >= request_->deadline) {
      return absl::DeadlineExceededError("the request's deadline has passed");
    }
  }
}

}  // namespace isthmus::router
