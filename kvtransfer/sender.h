// SPDX-License-Identifier: Apache-2.0
// The writing side of a transfer: everything that can be refused is refused before the first byte.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
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

// The writes of one transfer, in as many pieces as its pages become ready. Not thread-safe; a piece
// may be pushed by any thread while the owner of the pages computes the next one.
class Pusher {
 public:
  // Refuses what CheckTarget refuses, before the first byte. `transport` must outlive the pusher.
  static absl::StatusOr<Pusher> Open(Transport& transport, const v1::KvReservation& reservation,
                                     const v1::TransferEndpoint& target, uint64_t own_fingerprint);
  Pusher(Pusher&&) = default;
  Pusher& operator=(Pusher&&) = default;

  // Writes all of `spans` and returns when every byte is in the owner's memory. Their local bytes
  // must stay as they are until then, and may be reused afterwards.
  //
  // What CheckSpans refuses; InvalidArgument also for a unit that the reservation does not name:
  // it may be another sequence's. DeadlineExceeded: `deadline` was over before the first byte or
  // before the last acknowledgement. Otherwise what the transport says (Transport::Write). After an
  // error every further call returns it and writes nothing.
  absl::Status Push(std::span<const PageSpan> spans, absl::Time deadline);

  // Acknowledged so far.
  uint64_t bytes() const { return bytes_; }

 private:
  Pusher(Transport& transport, v1::TransferEndpoint target)
      : transport_(&transport), target_(std::move(target)) {}
  void CollectUnits(const v1::KvReservation& reservation);
  absl::Status CheckReserved(std::span<const PageSpan> spans) const;

  Transport* transport_;
  v1::TransferEndpoint target_;
  std::string transfer_id_;                           // For messages.
  std::vector<std::pair<uint32_t, uint32_t>> units_;  // Region and unit of all reserved, sorted.
  absl::Status failure_;
  uint64_t bytes_ = 0;
};

}  // namespace isthmus::transfer
