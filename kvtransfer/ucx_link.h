// SPDX-License-Identifier: Apache-2.0
// A connection to the process whose memory is written to; internal to the UCX transport. A write
// has a link to itself, so what spoils it (a deadline, a dead peer) spoils no other write.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "kvtransfer/region.h"
#include "kvtransfer/ucx_endpoint.h"
#include "proto/kv_reservation.pb.h"

namespace isthmus::transfer {

// Of UCX's tcp lane, both ways; and what of a page fits into one beside UCX's headers.
inline constexpr size_t kSegmentBytes = 256 << 10;
inline constexpr size_t kPieceBytes = kSegmentBytes - 1024;

inline constexpr unsigned kHelloId = 1;
inline constexpr unsigned kAnswerId = 2;

// The header of a hello and of its answer. `number` pairs them.
struct Greeting {
  uint64_t incarnation = 0;
  uint64_t number = 0;
};

class UcxLink : public UcxEndpoint {
 public:
  UcxLink(UcxProgress* progress, const v1::TransferEndpoint& target, uint64_t greeting_number);
  ~UcxLink() override { ReleaseKeys(); }

  // Connects, and asks who is there: an address that a dead process left to another one must not
  // lead to a single write. Aborted: another incarnation. InvalidArgument: an address that is none.
  // Unavailable, DeadlineExceeded. After an error the link must be closed, as after one of Write.
  absl::Status Connect(MutexLock& lock, ucp_worker_h worker, const v1::TransferEndpoint& target,
                       absl::Time deadline);

  // The answer to the hello, from the transport.
  void OnAnswer(uint64_t incarnation) { answer_ = incarnation; }

  // As Transport::Write.
  absl::Status Write(MutexLock& lock, const v1::TransferEndpoint& target,
                     std::span<const PageSpan> spans, absl::Time deadline);

  // Gives up the right to write; the worker must still be there.
  void ReleaseKeys();

  // Whether a write to `target` may use it.
  bool Serves(const v1::TransferEndpoint& target) const;
  uint64_t greeting_number() const { return hello_.number; }

 private:
  absl::Status WritePiece(MutexLock& lock, std::span<const std::byte> bytes, uint64_t address,
                          ucp_rkey_h key, absl::Time deadline);
  absl::Status ImportKeys(const v1::TransferEndpoint& target);

  const uint32_t generation_;  // Of the regions whose keys are imported.
  Greeting hello_;             // What is sent; `incarnation` is whom we want.
  std::optional<uint64_t> answer_;
  std::vector<ucp_rkey_h> keys_;  // Per region; null for an empty one.
};

}  // namespace isthmus::transfer
