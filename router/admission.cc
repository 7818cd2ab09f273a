// SPDX-License-Identifier: Apache-2.0
#include "router/admission.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace isthmus::router {
namespace {

// How long a client that left may keep its place in the queue.
constexpr std::chrono::milliseconds kCancelPoll(20);

}  // namespace

absl::StatusOr<Admission::Place> Admission::Enter(absl::Time deadline,
                                                  const std::function<bool()>& is_cancelled) {
  MutexLock lock(mutex_);
  if (active_ < max_active_ && queued_.empty()) {
    ++active_;
    return Place(this);
  }
  if (static_cast<int64_t>(queued_.size()) >= max_queued_) {
    return absl::ResourceExhaustedError(absl::StrCat(active_, " requests are active and ",
                                                     queued_.size(), " wait, want at most ",
                                                     max_active_, " and ", max_queued_));
  }
  const uint64_t ticket = next_ticket_++;
  queued_.push_back(ticket);
  absl::Status status;
  while (status.ok() && (queued_.front() != ticket || active_ >= max_active_)) {
    changed_.wait_for(lock, kCancelPoll);
    if (is_cancelled()) status = absl::CancelledError("the client left while its request waited");
    if (absl::Now() >= deadline) {
      status = absl::DeadlineExceededError("the request waited until its deadline");
    }
  }
  queued_.erase(std::find(queued_.begin(), queued_.end(), ticket));
  changed_.notify_all();
  if (!status.ok()) return status;
  ++active_;
  return Place(this);
}

void Admission::Leave() {
  MutexLock lock(mutex_);
  --active_;
  changed_.notify_all();
}

int64_t Admission::active() const {
  MutexLock lock(mutex_);
  return active_;
}

int64_t Admission::queued() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(queued_.size());
}

}  // namespace isthmus::router
