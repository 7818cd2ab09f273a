// SPDX-License-Identifier: Apache-2.0
#include "router/token_relay.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace isthmus::router {

// Under mutex_.
void TokenMailbox::Merge(const v1::SequenceTokens& tokens) {
  ++num_messages_;
  has_end_ = has_end_ || tokens.end() != v1::SEQUENCE_END_UNSPECIFIED;
  const auto found =
      std::ranges::find(pending_, tokens.reply_index(), &v1::SequenceTokens::reply_index);
  if (found == pending_.end()) {
    pending_.push_back(tokens);
    return;
  }
  v1::SequenceTokens& pending = *found;
  const uint64_t next = pending.first_index() + static_cast<uint64_t>(pending.token_ids_size());
  if (tokens.token_ids_size() > 0 && tokens.first_index() != next) {
    failure_ =
        absl::InternalError(absl::StrCat("token ", tokens.first_index(), " came, want ", next));
    return;
  }
  pending.mutable_token_ids()->MergeFrom(tokens.token_ids());
  pending.mutable_logits_crc32c()->MergeFrom(tokens.logits_crc32c());
  pending.mutable_logprobs()->MergeFrom(tokens.logprobs());
  pending.set_end(tokens.end());
  if (tokens.has_error()) *pending.mutable_error() = tokens.error();
}

void TokenMailbox::Push(const v1::SequenceTokens& tokens) {
  bool overflows = false;
  bool wakes = false;
  {
    MutexLock lock(mutex_);
    if (has_overflowed_ || !failure_.ok()) return;
    if (num_messages_ >= max_behind_) {
      has_overflowed_ = overflows = true;
    } else {
      Merge(tokens);
    }
    wakes = !wants_end_alone_ || has_overflowed_ || !failure_.ok() || has_end_;
  }
  if (wakes) changed_.notify_one();
  if (overflows && on_overflow_) on_overflow_();
}

void TokenMailbox::Fail(const absl::Status& status) {
  {
    MutexLock lock(mutex_);
    if (failure_.ok()) failure_ = status;
  }
  changed_.notify_one();
}

absl::StatusOr<std::vector<v1::SequenceTokens>> TokenMailbox::TakeFor(absl::Duration timeout,
                                                                      absl::Time not_before) {
  MutexLock lock(mutex_);
  const auto has_ended = [this] { return has_overflowed_ || !failure_.ok() || has_end_; };
  const absl::Duration pause = not_before - clock_.Now();
  if (pause > absl::ZeroDuration() && !has_ended()) {
    wants_end_alone_ = true;
    clock_.WaitFor(changed_, lock, pause, has_ended);
    wants_end_alone_ = false;
  }
  const auto has_news = [&] { return num_messages_ > 0 || has_ended(); };
  if (!has_news()) clock_.WaitFor(changed_, lock, timeout, has_news);
  if (has_overflowed_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the client reads more slowly than tokens are made: it is more than ",
                     max_behind_, " messages behind"));
  }
  if (num_messages_ > 0) {
    num_messages_ = 0;
    has_end_ = false;
    return std::exchange(pending_, {});
  }
  if (!failure_.ok()) return failure_;
  return std::vector<v1::SequenceTokens>();
}

bool TokenMailbox::has_overflowed() const {
  MutexLock lock(mutex_);
  return has_overflowed_;
}

absl::Status TokenMailbox::failure() const {
  MutexLock lock(mutex_);
  return failure_;
}

void TokenRelay::Subscribe(const std::string& transfer_id, std::shared_ptr<TokenMailbox> mailbox) {
  MutexLock lock(mutex_);
  mailboxes_[transfer_id] = std::move(mailbox);
}

void TokenRelay::Unsubscribe(const std::string& transfer_id) {
  MutexLock lock(mutex_);
  mailboxes_.erase(transfer_id);
}

void TokenRelay::Deliver(const v1::StepTokens& step) {
  MutexLock lock(mutex_);
  for (const v1::SequenceTokens& tokens : step.sequences()) {
    const auto found = mailboxes_.find(tokens.transfer_id());
    if (found != mailboxes_.end()) found->second->Push(tokens);  // Else its client has left.
  }
}

void TokenRelay::FailAll(const absl::Status& status) {
  MutexLock lock(mutex_);
  for (auto& [transfer_id, mailbox] : mailboxes_) mailbox->Fail(status);
}

}  // namespace isthmus::router
