// SPDX-License-Identifier: Apache-2.0
// From a placed request to a sequence that runs on the decode worker: reserve there, prefill and
// push, hand over. Whatever happens, the pages are given back in the end.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/accept.h"
#include "router/place.h"
#include "router/token_relay.h"
#include "services/base/clock.h"

namespace isthmus::router {

// One attempt to run a request on a pair of workers, from the reservation on. Ends the sequence at
// the decode worker when it is destroyed before its last token came.
class Attempt {
 public:
  Attempt(const RoutedRequest* request, Placement placement, uint64_t router_incarnation,
          Clock& clock, std::function<bool()> is_cancelled);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  // Reserve, Prefill, Handoff. OK means that the decode worker has verified and admitted the
  // sequence, so its first token may go to the client. Errors are those of the workers.
  absl::Status HandOver();

  uint32_t first_token() const { return first_token_; }
  uint64_t kv_bytes() const { return kv_bytes_; }
  uint64_t digests_verified() const { return digests_verified_; }

  // The next tokens after the first. An error ends the sequence; so does a message with `end` set.
  // Cancelled, DeadlineExceeded: as for the request. ResourceExhausted: the client was too slow.
  absl::StatusOr<v1::SequenceTokens> NextTokens();

 private:
  absl::StatusOr<v1::KvReservation> Reserve();
  absl::StatusOr<v1::KvHandoff> Prefill(v1::KvReservation reservation);
  rpc::CallOptions Call() const;

  const RoutedRequest* const request_;
  const Placement placement_;
  const uint64_t router_incarnation_;
  Clock& clock_;
  const std::function<bool()> is_cancelled_;
  const std::string transfer_id_;
  std::shared_ptr<SequenceQueue> tokens_;
  bool is_reserved_ = false;    // The decode worker may hold pages for us.
  bool writer_is_done_ = true;  // No write into them can be under way.
  uint32_t first_token_ = 0;
  uint64_t kv_bytes_ = 0;
  uint64_t digests_verified_ = 0;
};

}  // namespace isthmus::router
