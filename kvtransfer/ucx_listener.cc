// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_listener.h"

#include <algorithm>
#include <utility>

#include "kvtransfer/ucx_address.h"
#include "kvtransfer/ucx_resources.h"
#include "services/base/log.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

// Of all writers together; a stranger who takes more is turned away.
constexpr size_t kMaxAccepted = 4096;

}  // namespace

absl::Status UcxListener::Open(ucp_worker_h worker, absl::string_view devices) {
  worker_ = worker;
  ISTHMUS_ASSIGN_OR_RETURN(const SocketAddress address, AddressOfDevice(devices));
  ucp_listener_params_t params = {};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr = {address.get(), address.length};
  params.conn_handler = {OnConnection, this};
  ucs_status_t status = ucp_listener_create(worker, &params, &listener_);
  if (status != UCS_OK) return UcxSetUpError("listening", status);
  ucp_listener_attr_t attributes = {};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  status = ucp_listener_query(listener_, &attributes);
  if (status != UCS_OK) return UcxSetUpError("the listener's address", status);
  address_ = FormatSocketAddress(attributes.sockaddr);
  return absl::OkStatus();
}

// Runs inside progress, so under the lock.
void UcxListener::OnConnection(ucp_conn_request_h request, void* self) {
  auto* listener = static_cast<UcxListener*>(self);
  if (listener->accepted_.size() >= kMaxAccepted) {
    ucp_listener_reject(listener->listener_, request);
    return;
  }
  auto endpoint = std::make_unique<UcxEndpoint>(listener->progress_);
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  const absl::Status status = endpoint->Create(listener->worker_, params);
  if (status.ok()) {
    listener->accepted_.push_back(std::move(endpoint));
  } else {
    LogWarning("a writer could not connect", {{"status", status.ToString()}});
  }
}

void UcxListener::CloseFailed(MutexLock& lock) {
  while (true) {
    const auto failed = std::find_if(accepted_.begin(), accepted_.end(),
                                     [](const auto& one) { return one->has_failed(); });
    if (failed == accepted_.end()) return;
    CloseOne(lock, failed);
  }
}

void UcxListener::CloseOne(MutexLock& lock,
                           std::list<std::unique_ptr<UcxEndpoint>>::iterator position) {
  std::unique_ptr<UcxEndpoint> taken = std::move(*position);
  accepted_.erase(position);  // Before the wait, so that nobody else takes it.
  if (!taken->Close(lock)) abandoned_.push_back(std::move(taken));
}

void UcxListener::Close(MutexLock& lock) {
  if (listener_ != nullptr) ucp_listener_destroy(std::exchange(listener_, nullptr));
  while (!accepted_.empty()) CloseOne(lock, accepted_.begin());
}

}  // namespace isthmus::transfer
