// SPDX-License-Identifier: Apache-2.0
// The writing side of a transfer: everything that can be refused is refused before the first byte.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvtransfer/region.h"
#include "kvtransfer/transport.h"
#include "proto/kv_reservation.pb.h"

namespace isthmus::transfer {

// Whether a writer with `own_fingerprint` may fill `reservation` through `target`. Both values in
// every message. FailedPrecondition: another layout or transport. Aborted: the reservation and the
// endpoint are of different runs of the worker. Scope: peer.
absl::Status CheckTarget(const v1::KvReservation& reservation, const v1::TransferEndpoint& target,
                         uint64_t own_fingerprint, absl::string_view own_transport);

// Whether every span lies in a region of `target`, under its present generation. Aborted: another
// generation. InvalidArgument: no such region or unit, or more bytes than a unit has.
absl::Status CheckSpans(const v1::TransferEndpoint& target, std::span<const PageSpan> spans);

// Checks, then writes. Returns the bytes written, all of them in the owner's memory.
absl::StatusOr<uint64_t> Push(Transport& transport, const v1::KvReservation& reservation,
                              const v1::TransferEndpoint& target, uint64_t own_fingerprint,
                              std::span<const PageSpan> spans, absl::Time deadline);

}  // namespace isthmus::transfer
