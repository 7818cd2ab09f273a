// SPDX-License-Identifier: Apache-2.0
// From a placed request to a sequence that runs on the decode worker: reserve there, prefill and
// push, hand over. Whatever happens, the pages are given back in the end.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "router/accept.h"
#include "router/canceller.h"
#include "router/place.h"
#include "router/token_relay.h"
#include "services/base/clock.h"

namespace isthmus::router {

// What an attempt needs besides its request and its pair; all of it outlives the attempt.
struct AttemptSetting {
  uint64_t router_incarnation = 0;
  size_t max_behind_messages = 0;
  absl::Duration gather_time;
  Canceller* canceller = nullptr;
  Clock* clock = nullptr;
  std::function<bool()> is_cancelled;  // Whether the client has left.
  std::function<void()> on_overflow;   // The client reads too slowly: end its call, at once.
};

// One attempt to run a request on a pair of workers. When it is destroyed before the last token
// came, the canceller gives back what both hold; nobody waits for that.
class Attempt {
 public:
  Attempt(const RoutedRequest* request, Placement placement, AttemptSetting setting);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  // Sets pages aside at the decode worker. Errors, here and below, are those of the workers;
  // Cancelled means that the client has left, and nothing else.
  absl::Status Reserve();

  // After Reserve: Prefill, Handoff. OK means that the decode worker has verified and admitted the
  // sequence, so its first token may go to the client.
  absl::Status HandOver();

  // Which workers the last error is about: those that another attempt should avoid, or, after
  // ResourceExhausted, the one that has no room.
  const std::set<uint64_t>& blamed() const { return blamed_; }

  // The first output token, with its digest when the request wants digests.
  const v1::SequenceTokens& first_token() const { return first_token_; }
  uint64_t kv_bytes() const { return kv_bytes_; }
  uint64_t digests_verified() const { return digests_verified_; }

  // The next tokens after the first, all that have come; gather_time after the last ones on average
  // at least, so that a quick worker does not cost a message for each token. An error ends the
  // sequence; so does a message with `end` set. Cancelled, DeadlineExceeded: as for the request.
  // ResourceExhausted: the client was too slow.
  absl::StatusOr<v1::SequenceTokens> NextTokens();

  // Whether the client's call was ended because it was too slow.
  bool has_overflowed() const { return tokens_->has_overflowed(); }

 private:
  absl::StatusOr<v1::KvHandoff> Prefill();
  absl::Status Admit(v1::KvHandoff handoff);
  rpc::CallOptions CallTo(const WorkerLink& link) const;
  // Notes who is to blame and whether it is still there; makes sense of cancelled calls.
  absl::Status Judge(absl::Status status, WorkerLink& callee, bool blames_both);
  absl::Status WhyCancelled(const absl::Status& status, const WorkerLink& callee) const;

  const RoutedRequest* const request_;
  Placement placement_;
  const AttemptSetting setting_;
  const std::string transfer_id_;
  const std::shared_ptr<TokenMailbox> tokens_;
  v1::KvReservation reservation_;
  std::set<uint64_t> blamed_;
  bool may_be_reserved_ = false;  // The decode worker may hold pages for us.
  bool may_write_ = false;        // The prefill worker may hold pages and write.
  v1::SequenceTokens first_token_;
  absl::Time next_take_at_ = absl::InfinitePast();
  uint64_t kv_bytes_ = 0;
  uint64_t digests_verified_ = 0;
};

// Whether a request that failed so may be tried on another pair.
bool IsWorthAnotherPair(const absl::Status& status);

}  // namespace isthmus::router
