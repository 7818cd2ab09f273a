// SPDX-License-Identifier: Apache-2.0
// The one lock around a UCX worker and the waits under it; internal to transport_ucx.cc.
//
// Whoever waits makes progress for everybody. When there is nothing to do, one waiter sleeps on
// UCX's descriptor, without the lock, and the others on a condition variable; who moves anything
// wakes them all.
#pragma once

#include <ucp/api/ucp.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "services/base/mutex.h"

namespace isthmus::transfer {

class UcxProgress {
 public:
  UcxProgress() = default;
  ~UcxProgress();

  // `worker` must outlive every wait. Unavailable: no descriptor to sleep on.
  absl::Status Open(ucp_worker_h worker);

  // The lock that every call of UCX needs. In turn: who progresses all the time does not keep it
  // from others.
  MutexLock Lock();

  // Makes progress until `is_done` (called under the lock) or until `deadline`; returns what it
  // says then. Lets the lock go meanwhile, so that others post and wait too.
  bool WaitUntil(MutexLock& lock, absl::Time deadline, absl::FunctionRef<bool()> is_done);

  // Progress that is due anyway, a bounded piece of it, under the lock. False: there was none.
  bool Advance();

  // Lets every waiter look again. Under the lock.
  void Wake();

 private:
  void Yield(MutexLock& lock);
  bool SleepOnDescriptor(MutexLock& lock, absl::Duration timeout);  // True: an event of UCX's.

  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;  // UCX's.
  int wake_fd_ = -1;   // Ours: wakes the sleeper when another thread took the event.

  Mutex turn_;  // Held from wanting mutex_ until having it.
  Mutex mutex_;
  CondVar changed_;
  bool has_sleeper_ = false;  // On the descriptor. Guarded by mutex_, as everything below.
  bool is_wake_sent_ = false;
  int num_waiters_ = 0;      // On changed_.
  int num_idle_events_ = 0;  // In a row, with no progress behind them.
};

}  // namespace isthmus::transfer
