// SPDX-License-Identifier: Apache-2.0
// The owner's side of connections: accepts those of writers, and closes them once they are gone;
// internal to the UCX transport.
#pragma once

#include <ucp/api/ucp.h>

#include <list>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvtransfer/ucx_endpoint.h"

namespace isthmus::transfer {

// All under the lock of `progress`, which must outlive the listener, as the worker must but for
// its last moment: Close before the worker goes.
class UcxListener {
 public:
  explicit UcxListener(UcxProgress* progress) : progress_(progress) {}

  // Listens at a free port of the first of `devices`. Unavailable.
  absl::Status Open(ucp_worker_h worker, absl::string_view devices);

  // "127.0.0.1:4711".
  const std::string& address() const { return address_; }

  // Closes the connections of writers that are gone. Called now and then.
  void CloseFailed(MutexLock& lock);

  // Closes all, and the listener.
  void Close(MutexLock& lock);

 private:
  static void OnConnection(ucp_conn_request_h request, void* self);
  void CloseOne(MutexLock& lock, std::list<std::unique_ptr<UcxEndpoint>>::iterator position);

  UcxProgress* const progress_;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  std::string address_;
  std::list<std::unique_ptr<UcxEndpoint>> accepted_;
  std::list<std::unique_ptr<UcxEndpoint>> abandoned_;  // Closed, but UCX may still touch them.
};

}  // namespace isthmus::transfer
