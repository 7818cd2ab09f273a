// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_link.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvtransfer/ucx_address.h"
#include "kvtransfer/ucx_resources.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {
namespace {

uint32_t GenerationOf(const v1::TransferEndpoint& target) {
  return target.regions_size() == 0 ? 0 : target.regions(0).generation();
}

}  // namespace

UcxLink::UcxLink(UcxProgress* progress, const v1::TransferEndpoint& target,
                 uint64_t greeting_number)
    : UcxEndpoint(progress),
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

absl::Status UcxLink::Connect(MutexLock& lock, ucp_worker_h worker,
                              const v1::TransferEndpoint& target, absl::Time deadline) {
  ISTHMUS_ASSIGN_OR_RETURN(const SocketAddress address, ParseSocketAddress(target.address()));
  ucp_ep_params_t params = {};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER;
  params.sockaddr = {address.get(), address.length};
  ISTHMUS_RETURN_IF_ERROR(Create(worker, params));
  ucp_request_param_t send = Params();
  send.op_attr_mask |= UCP_OP_ATTR_FIELD_FLAGS;
  send.flags = UCP_AM_SEND_FLAG_REPLY;
  Posted(ucp_am_send_nbx(endpoint(), kHelloId, &hello_, sizeof(hello_), nullptr, 0, &send));
  ISTHMUS_RETURN_IF_ERROR(WaitFor(lock, "hello to the decode worker", deadline,
                                  [this] { return answer_.has_value(); }));
  const uint64_t answer = answer_.value_or(0);  // WaitFor returns OK only once it is there.
  if (answer == hello_.incarnation) return ImportKeys(target);
  return WithFaultScope(
      absl::AbortedError(absl::StrFormat("decode worker's incarnation is %016x, want %016x", answer,
                                         hello_.incarnation)),
      FaultScope::kPeer);
}

absl::Status UcxLink::ImportKeys(const v1::TransferEndpoint& target) {
  for (const v1::RegionCard& region : target.regions()) {
    ucp_rkey_h key = nullptr;
    if (!region.key().empty()) {
      const ucs_status_t status = ucp_ep_rkey_unpack(endpoint(), region.key().data(), &key);
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
  Posted(ucp_put_nbx(endpoint(), bytes.data(), bytes.size(), address, key, &param));
  Posted(ucp_ep_flush_nbx(endpoint(), &param));
  return WaitFor(lock, "write", deadline, [this] { return num_pending() == 0; });
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

}  // namespace isthmus::transfer
