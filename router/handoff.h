// SPDX-License-Identifier: Apache-2.0
// From a placed request to a sequence that runs on the decode worker: reserve there, prefill and
// push, hand over. Whatever happens, the pages are given back in the end.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

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

  // Sets pages aside at the decode worker. Under `ask_id`, unless it is 0, others should give way
  // when it has none. Errors, here and below, are those of the workers; Cancelled means that the
  // client has left, and nothing else.
  absl::Status Reserve(uint64_t ask_id);

  // After Reserve: Prefill, Handoff. OK means that the decode worker has verified and admitted the
  // sequence, so its first token may go to the client.
  absl::Status HandOver();

  // Which workers the last error is about: those that another attempt should avoid, or, after
  // ResourceExhausted, the one that has no room.
  const std::set<uint64_t>& blamed() const { return blamed_; }

  // The first output token of each reply, with what the request wants to know of it.
  const std::vector<v1::SequenceTokens>& first_tokens() const { return first_tokens_; }
  // Of every prompt token but the first, when the request wants them.
  const v1::PromptLogprobs& prompt_logprobs() const { return prompt_logprobs_; }
  // Prompt tokens that the prefill worker had from an earlier request.
  uint64_t cached_prompt_tokens() const { return cached_prompt_tokens_; }
  uint64_t kv_bytes() const { return kv_bytes_; }
  uint64_t digests_verified() const { return digests_verified_; }

  // The next tokens after the first, all that have come, a message for each reply; gather_time
  // after the last ones on average at least, so that a quick worker does not cost a message for
  // each token. An error ends all replies; a message with `end` set ends its own. To be called
  // while a reply is open. Cancelled, DeadlineExceeded: as for the request. ResourceExhausted: the
  // client was too slow.
  absl::StatusOr<std::vector<v1::SequenceTokens>> NextTokens();

  // The client has the whole of that reply although its worker goes on with it: makes an end of it
  // in the background, and tells nothing of it any more.
  void EndReply(uint32_t reply_index);

  // Whether the client's call was ended because it was too slow.
  bool has_overflowed() const { return tokens_->has_overflowed(); }

 private:
  absl::StatusOr<v1::KvHandoff> Prefill();
  absl::Status Admit(v1::KvHandoff handoff);
  absl::StatusOr<std::vector<v1::SequenceTokens>> Sift(std::vector<v1::SequenceTokens> messages);
  absl::Status TakeFirstTokens(const v1::KvHandoff& handoff);
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
  std::vector<v1::SequenceTokens> first_tokens_;
  v1::PromptLogprobs prompt_logprobs_;
  std::set<uint32_t> ended_there_;  // Replies whose end the worker has told.
  std::set<uint32_t> ended_here_;   // Those of EndReply.
  absl::Time next_take_at_ = absl::InfinitePast();
  uint64_t cached_prompt_tokens_ = 0;
  uint64_t kv_bytes_ = 0;
  uint64_t digests_verified_ = 0;
};

// Whether a request that failed so may be tried on another pair.
bool IsWorthAnotherPair(const absl::Status& status);

}  // namespace isthmus::router
