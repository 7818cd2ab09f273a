// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_endpoint.h"

#include <utility>

#include "kvtransfer/ucx_resources.h"
#include "services/base/clock.h"

namespace isthmus::transfer {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Milliseconds(200);

}  // namespace

absl::Status UcxEndpoint::Create(ucp_worker_h worker, ucp_ep_params_t params) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler = {OnPeerFailure, this};
  const ucs_status_t status = ucp_ep_create(worker, &params, &endpoint_);
  if (status == UCS_OK) return absl::OkStatus();
  endpoint_ = nullptr;
  failure_ = status;
  return UcxError("endpoint", status);
}

void UcxEndpoint::OnPeerFailure(void* self, ucp_ep_h, ucs_status_t status) {
  auto* endpoint = static_cast<UcxEndpoint*>(self);
  if (endpoint->failure_ == UCS_OK) endpoint->failure_ = status;
}

void UcxEndpoint::OnDone(void* request, ucs_status_t status, void* self) {
  auto* endpoint = static_cast<UcxEndpoint*>(self);
  --endpoint->num_pending_;
  if (status != UCS_OK && endpoint->failure_ == UCS_OK) endpoint->failure_ = status;
  ucp_request_free(request);
}

ucp_request_param_t UcxEndpoint::Params() {
  ucp_request_param_t param = {};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = OnDone;
  param.user_data = this;
  return param;
}

void UcxEndpoint::Posted(void* request) {
  if (UCS_PTR_IS_PTR(request)) {
    ++num_pending_;
  } else if (UCS_PTR_IS_ERR(request) && failure_ == UCS_OK) {
    failure_ = UCS_PTR_STATUS(request);
  }
}

absl::Status UcxEndpoint::WaitFor(MutexLock& lock, absl::string_view what, absl::Time deadline,
                                  absl::FunctionRef<bool()> is_done) {
  const bool done =
      progress_->WaitUntil(lock, deadline, [this, is_done] { return has_failed() || is_done(); });
  if (has_failed()) return UcxError(what, failure_);
  return done ? absl::OkStatus() : UcxDeadlineError(what);
}

bool UcxEndpoint::Close(MutexLock& lock) {
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
