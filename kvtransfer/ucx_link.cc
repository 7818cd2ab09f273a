// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/ucx_resources.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Milliseconds(200);

uint32_t GenerationOf(const v1::TransferEndpoint& target) {
  return target.regions_size() == 0 ? 0 : target.regions(0).generation();
}

}  // namespace

UcxLink::UcxLink(UcxProgress* progress, const v1::TransferEndpoint& target,
                 uint64_t greeting_number)
    : progress_(progress),
      generation_(GenerationOf(target)),
      hello_{target.worker_incarnation(), greeting_number} {}

void UcxLink::ReleaseKeys() {
  for (ucp_rkey_h key : keys_) {
    if (key != nullptr) ucp_rkey_destroy(key);
  }
  keys_.clear();
}

bool UcxLink::Serves(const v1::TransferEndpoint& target) const {
  return !has_failed() && hello_.incarnation == target.worker_incarnation() &&
         generation_ == GenerationOf(target);
}

void UcxLink::OnPeerFailure(void* link, ucp_ep_h, ucs_status_t status) {
  auto* self = static_cast<UcxLink*>(link);
  if (self->failure_ == UCS_OK) self->failure_ = status;
}

void UcxLink::OnDone(void* request, ucs_status_t status, void* link) {
  auto* self = static_cast<UcxLink*>(link);
  --self->num_pending_;
  if (status != UCS_OK && self->failure_ == UCS_OK) self->failure_ = status;
  ucp_request_free(request);
}

ucp_request_param_t UcxLink::Params() {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = OnDone;
  param.user_data = this;
  return param;
}

// Null: it has been done already, and OnDone will not be called.
void UcxLink::Posted(void* request) {
  if (UCS_PTR_IS_PTR(request)) {
    ++num_pending_;
  } else if (UCS_PTR_IS_ERR(request) && failure_ == UCS_OK) {
    failure_ = UCS_PTR_STATUS(request);
  }
}

absl::Status UcxLink::Wait(MutexLock& lock, absl::string_view what, size_t max_pending,
                           absl::Time deadline) {
  const bool is_done = progress_->WaitUntil(
      lock, deadline, [this, max_pending] { return has_failed() || num_pending_ <= max_pending; });
  if (has_failed()) return UcxError(what, failure_);
  return is_done ? absl::OkStatus() : UcxDeadlineError(what);
}

absl::Status UcxLink::Connect(MutexLock& lock, ucp_worker_h worker,
                              const v1::TransferEndpoint& target, absl::Time deadline) {
  constexpr absl::string_view kWhat = "hello to the decode worker";
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(target.address().data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnPeerFailure, this};
  const ucs_status_t status = ucp_ep_create(worker, &params, &endpoint_);
  if (status != UCS_OK) {
    endpoint_ = nullptr;
    return UcxError("endpoint of the decode worker", status);
  }
  ucp_request_param_t send = Params();
  send.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  send.flags = UCP_AM_SEND_FLAG_REPLY;
  Posted(ucp_am_send_nbx(endpoint_, kHelloId, &hello_, sizeof(hello_), nullptr, 0, &send));
  const bool is_answered =
      progress_->WaitUntil(lock, deadline, [this] { return has_failed() || answer_.has_value(); });
  if (has_failed()) return UcxError(kWhat, failure_);
  if (!is_answered) return UcxDeadlineError(kWhat);
  if (*answer_ != hello_.incarnation) {
    return WithFaultScope(
        absl::AbortedError(absl::StrFormat("decode worker's incarnation is %016x, want %016x",
                                           *answer_, hello_.incarnation)),
        FaultScope::kPeer);
  }
  return ImportKeys(target);
}

absl::Status UcxLink::ImportKeys(const v1::TransferEndpoint& target) {
  for (const v1::RegionCard& region : target.regions()) {
    ucp_rkey_h key = nullptr;
    if (!region.key().empty()) {
      const ucs_status_t status = ucp_ep_rkey_unpack(endpoint_, region.key().data(), &key);
      if (status != UCS_OK) return UcxError("remote key", status);
    }
    keys_.push_back(key);
  }
  return absl::OkStatus();
}

// Posts one piece and waits until the owner's memory holds it. One piece at a time, and each in one
// segment of UCX's: over tcp UCX 1.13 acknowledges every segment from the owner's side, and ends
// the owner's process when it works one off whose writer it already knows to be dead.
absl::Status UcxLink::WritePiece(MutexLock& lock, std::span<const std::byte> bytes,
                                 uint64_t address, ucp_rkey_h key, absl::Time deadline) {
  if (RealClock().Now() >= deadline) return UcxDeadlineError("write");
  const ucp_request_param_t param = Params();
  Posted(ucp_put_nbx(endpoint_, bytes.data(), bytes.size(), address, key, &param));
  Posted(ucp_ep_flush_nbx(endpoint_, &param));
  return Wait(lock, "write", 0, deadline);
}

absl::Status UcxLink::Write(MutexLock& lock, const v1::TransferEndpoint& target,
                            std::span<const PageSpan> spans, absl::Time deadline) {
  for (const PageSpan& span : spans) {
    const v1::RegionCard& region = target.regions(static_cast<int>(span.region));
    ucp_rkey_h key = span.region < keys_.size() ? keys_[span.region] : nullptr;
    if (key == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          "region ", span.region, " has no key, the peer gave ", keys_.size(), " regions"));
    }
    const uint64_t unit = region.base_address() + span.unit * region.unit_bytes();
    for (size_t at = 0; at < span.bytes.size(); at += kPieceBytes) {
      const size_t size = std::min(kPieceBytes, span.bytes.size() - at);
      ISTHMUS_RETURN_IF_ERROR(
          WritePiece(lock, span.bytes.subspan(at, size), unit + at, key, deadline));
    }
  }
  return absl::OkStatus();
}

bool UcxLink::Close(MutexLock& lock) {
  if (endpoint_ != nullptr) {
    ucp_request_param_t param = Params();
    param.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_EP_CLOSE_FLAG_FORCE;
    // Should it fail, the endpoint is gone all the same.
    Posted(ucp_ep_close_nbx(std::exchange(endpoint_, nullptr), &param));
  }
  return progress_->WaitUntil(lock, RealClock().Now() + kCloseTimeout,
                              [this] { return num_pending_ == 0; });
}

}  // namespace isthmus::transfer
