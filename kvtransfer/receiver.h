// SPDX-License-Identifier: Apache-2.0
// The owning side of a transfer: a sequence may run only after every page group that it needs was
// found to be what the writer meant to send.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvtransfer/transport.h"
#include "proto/kv_reservation.pb.h"

namespace isthmus::transfer {

// One page group that must have arrived. The numbers are those of PageGroupDigest.
struct ExpectedGroup {
  uint32_t cache_kind = 0;
  uint32_t page_index = 0;
  uint32_t first_layer = 0;
  uint32_t num_layers = 0;
  uint64_t first_position = 0;
  std::span<const std::byte> bytes;  // In the owner's memory.
};

// Computes the digest of what lies in memory now; the canary is made of the group's numbers.
using DigestFunction = absl::FunctionRef<uint32_t(const ExpectedGroup& group)>;

// Whether `handoff` belongs to `reservation` and to this run of this worker. Aborted: another
// incarnation or transfer. FailedPrecondition: another layout. Scope: peer.
absl::Status CheckHandoff(const v1::KvHandoff& handoff, const v1::KvReservation& reservation,
                          const Identity& own);

// Computes every expected group's digest and compares it with the one in `handoff`. Returns how
// many were verified, which is all of them.
//
// DataLoss, scope peer: a digest is missing, doubled or differs (both values are named), or one
// came that nobody expected.
absl::StatusOr<uint64_t> VerifyGroups(const v1::KvHandoff& handoff,
                                      std::span<const ExpectedGroup> expected,
                                      DigestFunction digest);

}  // namespace isthmus::transfer
