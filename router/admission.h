// SPDX-License-Identifier: Apache-2.0
// How many requests are worked on, and how many may wait for that, first come first served.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/base/mutex.h"

namespace isthmus::router {

class Admission {
 public:
  Admission(int64_t max_active, int64_t max_queued)
      : max_active_(max_active), max_queued_(max_queued) {}

  // Holds one place among the active requests while it lives.
  class Place {
   public:
    explicit Place(Admission* admission) : admission_(admission) {}
    Place(Place&& other) noexcept : admission_(std::exchange(other.admission_, nullptr)) {}
    Place& operator=(Place&&) = delete;
    ~Place() {
      if (admission_ != nullptr) admission_->Leave();
    }

   private:
    Admission* admission_;
  };

  // ResourceExhausted: too many wait already. DeadlineExceeded, Cancelled: so ended the wait.
  absl::StatusOr<Place> Enter(absl::Time deadline, const std::function<bool()>& is_cancelled);

  int64_t active() const;
  int64_t queued() const;

 private:
  void Leave();

  const int64_t max_active_;
  const int64_t max_queued_;
  mutable Mutex mutex_;
  CondVar changed_;
  int64_t active_ = 0;           // Guarded by mutex_.
  uint64_t next_ticket_ = 0;     // Guarded by mutex_.
  std::deque<uint64_t> queued_;  // Tickets in their order. Guarded by mutex_.
};

}  // namespace isthmus::router
