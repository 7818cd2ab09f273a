// SPDX-License-Identifier: Apache-2.0
// Who waits for what, the more urgent first: requests for being worked on, and among those that
// are, for room on the workers. services/base/urgency.h says who goes before whom: by class, by
// deadline, by arrival, and nobody waits for ever.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"
#include "services/base/urgency.h"

namespace isthmus::router {

// Thread-safe; every wait is the clock's.
class Admission {
 public:
  Admission(int64_t max_active, int64_t max_queued, Clock& clock)
      : max_active_(max_active), max_queued_(max_queued), clock_(clock) {}

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
  // Unavailable: the router drains.
  absl::StatusOr<Place> Enter(const Urgency& urgency, const std::function<bool()>& is_cancelled);

  // A place in the line of those that wait for room, from its first Wait to its end.
  class Turn {
   public:
    Turn(Admission* admission, const Urgency& urgency) : admission_(admission), urgency_(urgency) {}
    ~Turn() { End(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    // Waits until it is this request's turn to try; after a try that failed, until something has
    // changed as well. DeadlineExceeded, Cancelled: so ended the wait.
    absl::Status Wait(const std::function<bool()>& is_cancelled);

    // Lets the next one try.
    void End();

   private:
    friend class Admission;
    Admission* const admission_;
    const Urgency urgency_;
    bool is_in_line_ = false;  // Guarded by the admission's mutex, like all of these.
    bool has_tried_ = false;
    uint64_t seen_ = 0;
    CondVar wake_;
  };

  // Whether others wait for room, so that a request has to line up behind them.
  bool has_line() const;

  // Something has changed on the workers: who is first in line tries again.
  void Wake();

  // No more requests; those inside go on.
  void Close();
  bool is_closed() const;

  // Waits until no request is active or queued; false after `patience`.
  bool WaitUntilEmpty(absl::Duration patience);

  int64_t active() const;
  int64_t queued() const;

 private:
  struct Waiter {
    Urgency urgency;
    CondVar wake;
  };

  void Leave();
  void WakeFirstLocked();

  const int64_t max_active_;
  const int64_t max_queued_;
  Clock& clock_;
  mutable Mutex mutex_;
  CondVar emptied_;
  int64_t active_ = 0;        // Guarded by mutex_.
  bool is_closed_ = false;    // Guarded by mutex_.
  std::list<Waiter*> queue_;  // For being active, in their order. Guarded by mutex_.
  std::list<Turn*> line_;     // For room, in their order. Guarded by mutex_.
  uint64_t num_changes_ = 0;  // Guarded by mutex_.
};

}  // namespace isthmus::router
