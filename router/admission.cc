// SPDX-License-Identifier: Apache-2.0
#include "router/admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "services/base/fault.h"

namespace isthmus::router {
namespace {

// How long a client that left may keep its place. Everything else wakes a waiter at once.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);
// Room may appear without a sign of it: another router's request has ended.
constexpr absl::Duration kRetryPoll = absl::Milliseconds(100);
// Between two tries, however much changes.
constexpr absl::Duration kRetryPause = absl::Milliseconds(5);

// How long to wait before looking again.
absl::Duration NextLook(absl::Time now, absl::Time deadline) {
  return std::clamp(deadline - now, absl::ZeroDuration(), kCancelPoll);
}

}  // namespace

absl::StatusOr<Admission::Place> Admission::Enter(const Urgency& urgency,
                                                  const std::function<bool()>& is_cancelled) {
  const absl::Time deadline = urgency.deadline;
  MutexLock lock(mutex_);
  if (is_closed_) {
    return WithFaultScope(absl::UnavailableError("draining: the router takes no more requests"),
                          FaultScope::kPeer);
  }
  if (active_ < max_active_ && queue_.empty()) {
    ++active_;
    return Place(this);
  }
  if (static_cast<int64_t>(queue_.size()) >= max_queued_) {
    return absl::ResourceExhaustedError(absl::StrCat(active_, " requests are active and ",
                                                     queue_.size(), " wait, want at most ",
                                                     max_active_, " and ", max_queued_));
  }
  Waiter waiter{urgency, {}};
  queue_.insert(
      std::ranges::find_if(
          queue_, [&](const Waiter* other) { return GoesBefore(urgency, other->urgency); }),
      &waiter);
  const auto is_next = [&] { return queue_.front() == &waiter && active_ < max_active_; };
  absl::Status status;
  while (status.ok() && !is_next()) {
    clock_.WaitFor(waiter.wake, lock, NextLook(clock_.Now(), deadline), is_next);
    if (is_next()) break;
    if (is_cancelled()) status = absl::CancelledError("the client left while its request waited");
    if (clock_.Now() >= deadline) {
      status = absl::DeadlineExceededError("the request waited until its deadline");
    }
  }
  queue_.remove(&waiter);
  if (status.ok()) ++active_;
  WakeFirstLocked();
  if (!status.ok()) return status;
  return Place(this);
}

void Admission::WakeFirstLocked() {
  if (!queue_.empty() && active_ < max_active_) queue_.front()->wake.notify_one();
  if (queue_.empty() && active_ == 0) emptied_.notify_all();
}

void Admission::Leave() {
  MutexLock lock(mutex_);
  --active_;
  ++num_changes_;
  WakeFirstLocked();
  if (!line_.empty()) line_.front()->wake_.notify_one();
}

absl::Status Admission::Turn::Wait(const std::function<bool()>& is_cancelled) {
  Admission& all = *admission_;
  const absl::Time deadline = urgency_.deadline;
  MutexLock lock(all.mutex_);
  if (!is_in_line_) {
    is_in_line_ = true;
    all.line_.insert(
        std::ranges::find_if(
            all.line_, [this](const Turn* other) { return GoesBefore(urgency_, other->urgency_); }),
        this);
  }
  if (has_tried_) all.clock_.WaitFor(wake_, lock, kRetryPause, [] { return false; });
  const absl::Time tries_at = all.clock_.Now() + kRetryPoll;
  const auto may_try = [&] {
    return all.line_.front() == this && (!has_tried_ || seen_ != all.num_changes_);
  };
  while (!may_try()) {
    const absl::Time now = all.clock_.Now();
    if (has_tried_ && now >= tries_at && all.line_.front() == this) break;
    if (is_cancelled()) return absl::CancelledError("the client left while its request waited");
    if (now >= deadline) {
      return absl::DeadlineExceededError("the request waited for room until its deadline");
    }
    all.clock_.WaitFor(wake_, lock, NextLook(now, deadline), may_try);
  }
  has_tried_ = true;
  seen_ = all.num_changes_;
  return absl::OkStatus();
}

void Admission::Turn::End() {
  MutexLock lock(admission_->mutex_);
  if (!is_in_line_) return;
  is_in_line_ = false;
  has_tried_ = false;
  admission_->line_.remove(this);
  if (!admission_->line_.empty()) admission_->line_.front()->wake_.notify_one();
}

bool Admission::has_line() const {
  MutexLock lock(mutex_);
  return !line_.empty();
}

void Admission::Wake() {
  MutexLock lock(mutex_);
  ++num_changes_;
  if (!line_.empty()) line_.front()->wake_.notify_one();
}

void Admission::Close() {
  MutexLock lock(mutex_);
  is_closed_ = true;
}

bool Admission::is_closed() const {
  MutexLock lock(mutex_);
  return is_closed_;
}

bool Admission::WaitUntilEmpty(absl::Duration patience) {
  MutexLock lock(mutex_);
  return clock_.WaitFor(emptied_, lock, patience,
                        [this] { return active_ == 0 && queue_.empty(); });
}

int64_t Admission::active() const {
  MutexLock lock(mutex_);
  return active_;
}

int64_t Admission::queued() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(queue_.size() + line_.size());
}

}  // namespace isthmus::router
