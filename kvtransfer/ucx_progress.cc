// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_progress.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>

#include "kvtransfer/ucx_resources.h"
#include "services/base/clock.h"

namespace isthmus::transfer {
namespace {

// Waits sleep on descriptors that wake for every event, so this is only a net.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(50);
constexpr absl::Duration kSpin = absl::Microseconds(20);
constexpr int kMaxProgressCalls = 16;

// While a connection waits for a peer that hangs, UCX 1.13 keeps its descriptor readable and has
// nothing to do. After so many events for nothing the descriptor is left alone for a moment.
constexpr int kMaxIdleEvents = 4;
constexpr absl::Duration kIdleEventPause = absl::Milliseconds(1);

}  // namespace

UcxProgress::~UcxProgress() {
  if (wake_fd_ >= 0) close(wake_fd_);
}

absl::Status UcxProgress::Open(ucp_worker_h worker) {
  worker_ = worker;
  const ucs_status_t status = ucp_worker_get_efd(worker, &event_fd_);
  if (status != UCS_OK) return UcxSetUpError("no event descriptor", status);
  wake_fd_ = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (wake_fd_ < 0) return UcxSetUpError("no wake-up descriptor", UCS_ERR_IO_ERROR);
  return absl::OkStatus();
}

MutexLock UcxProgress::Lock() {
  MutexLock turn(turn_);
  return MutexLock(mutex_);
}

// A mutex that is let go and taken again at once would hardly ever reach another thread.
void UcxProgress::Yield(MutexLock& lock) {
  lock.unlock();
  MutexLock turn(turn_);
  lock.lock();
}

bool UcxProgress::Advance() {
  bool has_advanced = false;
  for (int i = 0; i < kMaxProgressCalls && ucp_worker_progress(worker_) != 0; ++i) {
    has_advanced = true;
  }
  if (has_advanced) {
    num_idle_events_ = 0;
    Wake();
  }
  return has_advanced;
}

void UcxProgress::Wake() {
  if (num_waiters_ > 0) changed_.notify_all();
  if (!has_sleeper_ || is_wake_sent_) return;
  const eventfd_t one = 1;
  is_wake_sent_ = eventfd_write(wake_fd_, one) == 0;
}

bool UcxProgress::SleepOnDescriptor(MutexLock& lock, absl::Duration timeout) {
  has_sleeper_ = true;
  const bool is_paused = num_idle_events_ >= kMaxIdleEvents;
  lock.unlock();
  pollfd events[] = {{wake_fd_, POLLIN, 0}, {event_fd_, POLLIN, 0}};
  const timespec patience =
      absl::ToTimespec(is_paused ? std::min(timeout, kIdleEventPause) : timeout);
  // A signal or an error only ends the wait early.
  ppoll(events, is_paused ? 1 : 2, &patience, nullptr);
  {
    MutexLock turn(turn_);
    lock.lock();
  }
  has_sleeper_ = false;
  if (is_wake_sent_) {
    eventfd_t count = 0;
    eventfd_read(wake_fd_, &count);
    is_wake_sent_ = false;
  }
  return is_paused || events[1].revents != 0;
}

bool UcxProgress::WaitUntil(MutexLock& lock, absl::Time deadline,
                            absl::FunctionRef<bool()> is_done) {
  absl::Time idle_since = RealClock().Now();
  bool done = false;
  while (true) {
    const bool has_advanced = Advance();
    done = is_done();
    const absl::Time now = RealClock().Now();
    if (done || now >= deadline) break;
    if (has_advanced) idle_since = now;
    if (now - idle_since < kSpin) {
      Yield(lock);
    } else if (ucp_worker_arm(worker_) == UCS_OK) {  // Otherwise something has come meanwhile.
      const absl::Duration timeout = std::min(deadline - now, kLongestSleep);
      if (!has_sleeper_) {
        num_idle_events_ = SleepOnDescriptor(lock, timeout) ? num_idle_events_ + 1 : 0;
      } else {
        ++num_waiters_;
        changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout));
        --num_waiters_;
      }
    }
  }
  // Somebody else must watch the descriptor now.
  if (num_waiters_ > 0 && !has_sleeper_) changed_.notify_one();
  return done;
}

}  // namespace isthmus::transfer
