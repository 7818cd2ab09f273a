// SPDX-License-Identifier: Apache-2.0
// One endpoint to the process whose memory is written to; internal to transport_ucx.cc. A write has
// a link to itself, so what spoils it (a deadline, a dead peer) spoils no other write.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "kvtransfer/region.h"
#include "kvtransfer/ucx_progress.h"
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

// All under the lock of `progress`, which must outlive the link, as the worker must. The link stays
// where it is: UCX has its address.
class UcxLink {
 public:
  UcxLink(UcxProgress* progress, const v1::TransferEndpoint& target, uint64_t greeting_number);
  ~UcxLink() { ReleaseKeys(); }
  UcxLink(const UcxLink&) = delete;
  UcxLink& operator=(const UcxLink&) = delete;

  // Connects, and asks who is there: an address that a dead process left to another one must not
  // lead to a single write. Aborted: another incarnation. Unavailable, DeadlineExceeded.
  absl::Status Connect(MutexLock& lock, ucp_worker_h worker, const v1::TransferEndpoint& target,
                       absl::Time deadline);

  // The answer to the hello, from the transport.
  void OnAnswer(uint64_t incarnation) { answer_ = incarnation; }

  // As Transport::Write. After an error the link must be closed.
  absl::Status Write(MutexLock& lock, const v1::TransferEndpoint& target,
                     std::span<const PageSpan> spans, absl::Time deadline);

  // Closes by force, once, and waits, for a bounded time, until UCX uses neither the link nor the
  // bytes of its writes any more. False when it still does: the link must be kept until the worker
  // is gone.
  bool Close(MutexLock& lock);

  // Gives up the right to write; the worker must still be there.
  void ReleaseKeys();

  // Whether a write to `target` may use it.
  bool Serves(const v1::TransferEndpoint& target) const;
  bool has_failed() const { return failure_ != UCS_OK; }
  uint64_t greeting_number() const { return hello_.number; }

 private:
  static void OnPeerFailure(void* link, ucp_ep_h, ucs_status_t status);
  static void OnDone(void* request, ucs_status_t status, void* link);

  ucp_request_param_t Params();
  void Posted(void* request);
  absl::Status Wait(MutexLock& lock, absl::string_view what, size_t max_pending,
                    absl::Time deadline);
  absl::Status WritePiece(MutexLock& lock, std::span<const std::byte> bytes, uint64_t address,
                          ucp_rkey_h key, absl::Time deadline);
  absl::Status ImportKeys(const v1::TransferEndpoint& target);

  UcxProgress* const progress_;
  const uint32_t generation_;  // Of the regions whose keys are imported.
  Greeting hello_;             // What is sent; `incarnation` is whom we want.
  std::optional<uint64_t> answer_;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_t failure_ = UCS_OK;  // The first one of the endpoint or of a request.
  size_t num_pending_ = 0;         // Requests that UCX has not ended.
  std::vector<ucp_rkey_h> keys_;   // Per region; null for an empty one.
};

}  // namespace isthmus::transfer
