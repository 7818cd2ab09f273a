// SPDX-License-Identifier: Apache-2.0
// One end of a connection of UCX's and the requests on it; internal to the UCX transport.
#pragma once

#include <ucp/api/ucp.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kvtransfer/ucx_progress.h"

namespace isthmus::transfer {

// All under the lock of `progress`, which must outlive the endpoint, as the worker must. It stays
// where it is: UCX has its address.
class UcxEndpoint {
 public:
  explicit UcxEndpoint(UcxProgress* progress) : progress_(progress) {}
  virtual ~UcxEndpoint() = default;
  UcxEndpoint(const UcxEndpoint&) = delete;
  UcxEndpoint& operator=(const UcxEndpoint&) = delete;

  // Connects, or accepts, as `params` say; the error handling is filled in. Called once.
  absl::Status Create(ucp_worker_h worker, ucp_ep_params_t params);

  // Whether the peer is gone, or a request has failed: of no use any more.
  bool has_failed() const { return failure_ != UCS_OK; }

  // Closes by force, once, and waits, for a bounded time, until UCX uses neither this object nor
  // the bytes of its requests any more. False when it still does: the object must be kept until the
  // worker is gone.
  bool Close(MutexLock& lock);

 protected:
  // For a request whose end Posted shall learn of.
  ucp_request_param_t Params();

  // Counts a request in. Null: it has been done already.
  void Posted(void* request);

  // Until `is_done`. Unavailable: the endpoint has failed. DeadlineExceeded. Both say `what`.
  absl::Status WaitFor(MutexLock& lock, absl::string_view what, absl::Time deadline,
                       absl::FunctionRef<bool()> is_done);

  ucp_ep_h endpoint() { return endpoint_; }
  size_t num_pending() const { return num_pending_; }

 private:
  static void OnPeerFailure(void* self, ucp_ep_h, ucs_status_t status);
  static void OnDone(void* request, ucs_status_t status, void* self);

  UcxProgress* const progress_;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t failure_ = UCS_OK;  // The first one of the endpoint or of a request.
  size_t num_pending_ = 0;         // Requests that UCX has not ended.
};

}  // namespace isthmus::transfer
