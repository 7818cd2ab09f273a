// SPDX-License-Identifier: Apache-2.0
// Owners of UCX's C objects and its status codes as ours; internal to the UCX transport.
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
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("ucx: ", what, ": ", ucs_status_string(status))),
      FaultScope::kPeer);
}

// The peer neither failed nor finished in time.
inline absl::Status UcxDeadlineError(absl::string_view what) {
  return WithFaultScope(
      absl::DeadlineExceededError(absl::StrCat("ucx: ", what, ": not finished in time")),
      FaultScope::kPeer);
}

// The same for set-up, which spoils the process.
inline absl::Status UcxSetUpError(absl::string_view what, ucs_status_t status) {
  return WithFaultScope(
      absl::UnavailableError(absl::StrCat("ucx: ", what, ": ", ucs_status_string(status))),
      FaultScope::kProcess);
}

}  // namespace isthmus::transfer
