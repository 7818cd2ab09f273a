// SPDX-License-Identifier: Apache-2.0
// From one decode worker's token stream to the requests that wait for its tokens.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/worker.pb.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"

namespace isthmus::router {

// Tokens of one transfer that its client has not read yet, as one message for each reply: who is
// behind catches up in one go.
class TokenMailbox {
 public:
  // More than `max_behind` messages of the worker that nobody took are too many: `on_overflow` is
  // called once, by the thread that delivers, and must not block.
  TokenMailbox(size_t max_behind, std::function<void()> on_overflow, Clock& clock)
      : max_behind_(max_behind), on_overflow_(std::move(on_overflow)), clock_(clock) {}

  // Never waits.
  void Push(const v1::SequenceTokens& tokens);

  // The stream is gone; what came before can still be taken.
  void Fail(const absl::Status& status);

  // What has come since the last call, one message for each reply that gained something, or nothing
  // within `timeout`. Before `not_before` only the end of a reply is worth waking up for.
  // ResourceExhausted: it overflowed. Internal: a token is missing or doubled. Otherwise what Fail
  // was given.
  absl::StatusOr<std::vector<v1::SequenceTokens>> TakeFor(
      absl::Duration timeout, absl::Time not_before = absl::InfinitePast());

  bool has_overflowed() const;

  // What Fail was given; OK until then.
  absl::Status failure() const;

 private:
  void Merge(const v1::SequenceTokens& tokens);

  const size_t max_behind_;
  const std::function<void()> on_overflow_;
  Clock& clock_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<v1::SequenceTokens> pending_;  // By reply, in order of arrival. Guarded by mutex_.
  size_t num_messages_ = 0;                  // In `pending_`. Guarded by mutex_.
  bool has_end_ = false;                     // In `pending_`. Guarded by mutex_.
  bool wants_end_alone_ = false;             // The reader does. Guarded by mutex_.
  bool has_overflowed_ = false;              // Guarded by mutex_.
  absl::Status failure_;                     // Guarded by mutex_.
};

class TokenRelay {
 public:
  // Before the handoff, so that no token can be missed.
  void Subscribe(const std::string& transfer_id, std::shared_ptr<TokenMailbox> mailbox);

  // Nothing of the mailbox is called any more when this has returned.
  void Unsubscribe(const std::string& transfer_id);

  // Never waits for a reader.
  void Deliver(const v1::StepTokens& step);

  // Ends every subscription with `status`: the stream is gone.
  void FailAll(const absl::Status& status);

 private:
  Mutex mutex_;
  std::map<std::string, std::shared_ptr<TokenMailbox>> mailboxes_;  // Guarded by mutex_.
};

}  // namespace isthmus::router
