// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/sender.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::transfer {

absl::Status CheckTarget(const v1::KvReservation& reservation, const v1::TransferEndpoint& target,
                         uint64_t own_fingerprint, absl::string_view own_transport) {
  if (target.transport() != own_transport) {
    return WithFaultScope(
        absl::FailedPreconditionError(absl::StrCat("transport differs: ours ", own_transport,
                                                   ", decode worker's ", target.transport())),
        FaultScope::kPeer);
  }
  for (const uint64_t theirs : {reservation.layout_fingerprint(), target.layout_fingerprint()}) {
    if (theirs == own_fingerprint) continue;
    return WithFaultScope(
        absl::FailedPreconditionError(absl::StrFormat(
            "kv layout differs: ours %016x, decode worker's %016x; same model and page_tokens?",
            own_fingerprint, theirs)),
        FaultScope::kPeer);
  }
  if (reservation.worker_incarnation() != target.worker_incarnation()) {
    return WithFaultScope(
        absl::AbortedError(absl::StrFormat(
            "decode worker's incarnation differs: reservation %016x, endpoint %016x",
            reservation.worker_incarnation(), target.worker_incarnation())),
        FaultScope::kPeer);
  }
  return absl::OkStatus();
}

absl::Status CheckSpans(const v1::TransferEndpoint& target, std::span<const PageSpan> spans) {
  for (const PageSpan& span : spans) {
    if (span.region >= static_cast<uint32_t>(target.regions_size())) {
      return absl::InvalidArgumentError(absl::StrCat("page span names region ", span.region,
                                                     ", the owner has ", target.regions_size()));
    }
    const v1::RegionCard& region = target.regions(static_cast<int>(span.region));
    if (span.region_generation != region.generation()) {
      return WithFaultScope(absl::AbortedError(absl::StrCat(
                                "region ", span.region, " has generation ", region.generation(),
                                ", the reservation names ", span.region_generation)),
                            FaultScope::kPeer);
    }
    if (span.unit >= region.num_units()) {
      return absl::InvalidArgumentError(absl::StrCat("page span names page ", span.unit,
                                                     " of region ", span.region, ", which has ",
                                                     region.num_units()));
    }
    if (span.bytes.size() > region.unit_bytes()) {
      return absl::InvalidArgumentError(absl::StrCat("page span has ", span.bytes.size(),
                                                     " bytes, pages of region ", span.region,
                                                     " have ", region.unit_bytes()));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<Pusher> Pusher::Open(Transport& transport, const v1::KvReservation& reservation,
                                    const v1::TransferEndpoint& target, uint64_t own_fingerprint) {
  ISTHMUS_RETURN_IF_ERROR(CheckTarget(reservation, target, own_fingerprint, transport.name()));
  Pusher pusher(transport, target);
  pusher.CollectUnits(reservation);
  return pusher;
}

void Pusher::CollectUnits(const v1::KvReservation& reservation) {
  for (const v1::CachePages& kind : reservation.pages()) {
    for (const v1::PageRef& page : kind.pages()) units_.emplace_back(page.region(), page.page());
  }
  if (reservation.has_state()) {
    units_.emplace_back(reservation.state().region(), reservation.state().slot());
  }
  std::sort(units_.begin(), units_.end());
  transfer_id_ = absl::BytesToHexString(reservation.transfer_id());
}

absl::Status Pusher::CheckReserved(std::span<const PageSpan> spans) const {
  for (const PageSpan& span : spans) {
    const std::pair unit(span.region, span.unit);
    if (std::binary_search(units_.begin(), units_.end(), unit)) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "page span names page ", span.unit, " of region ", span.region, ", which is none of the ",
        units_.size(), " that transfer ", transfer_id_, " has reserved"));
  }
  return absl::OkStatus();
}

absl::Status Pusher::Push(std::span<const PageSpan> spans, absl::Time deadline) {
  if (!failure_.ok() || spans.empty()) return failure_;
  failure_ = CheckSpans(target_, spans);
  if (failure_.ok()) failure_ = CheckReserved(spans);
  if (failure_.ok()) failure_ = transport_->Write(target_, spans, deadline);
  if (!failure_.ok()) return failure_;
  for (const PageSpan& span : spans) bytes_ += span.bytes.size();
  return absl::OkStatus();
}

}  // namespace isthmus::transfer
