// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/sender.h"

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

absl::StatusOr<uint64_t> Push(Transport& transport, const v1::KvReservation& reservation,
                              const v1::TransferEndpoint& target, uint64_t own_fingerprint,
                              std::span<const PageSpan> spans, absl::Time deadline) {
  ISTHMUS_RETURN_IF_ERROR(CheckTarget(reservation, target, own_fingerprint, transport.name()));
  ISTHMUS_RETURN_IF_ERROR(CheckSpans(target, spans));
  ISTHMUS_RETURN_IF_ERROR(transport.Write(target, spans, deadline));
  uint64_t bytes = 0;
  for (const PageSpan& span : spans) bytes += span.bytes.size();
  return bytes;
}

}  // namespace isthmus::transfer
