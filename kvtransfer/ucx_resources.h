// SPDX-License-Identifier: Apache-2.0
// Owners of UCX's C objects and its status codes as ours; internal to transport_ucx.cc.
#pragma once

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "services/base/fault.h"

namespace isthmus::transfer {

struct UcxContextDeleter {
  void operator()(ucp_context_h context) const { ucp_cleanup(context); }
};
struct UcxWorkerDeleter {
  void operator()(ucp_worker_h worker) const { ucp_worker_destroy(worker); }
};
using UcxContext = std::unique_ptr<ucp_context, UcxContextDeleter>;
using UcxWorker = std::unique_ptr<ucp_worker, UcxWorkerDeleter>;

// A failed UCX call as a status that spoils the peer: whatever UCX reports about an endpoint means
// that the process behind it cannot be written to.
inline absl::Status UcxError(absl::string_view what, ucs_status_t status) {
  const std::string text = absl::StrCat("ucx: ", what, ": ", ucs_status_string(status));
  if (status == UCS_ERR_TIMED_OUT) {
    return WithFaultScope(absl::DeadlineExceededError(text), FaultScope::kPeer);
  }
  return WithFaultScope(absl::UnavailableError(text), FaultScope::kPeer);
}

// The same for set-up, which spoils the process.
inline absl::Status UcxSetUpError(absl::string_view what, ucs_status_t status) {
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("ucx: ", what, ": ", ucs_status_string(status))),
      FaultScope::kProcess);
}

}  // namespace isthmus::transfer
