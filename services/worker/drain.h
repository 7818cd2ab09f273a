// SPDX-License-Identifier: Apache-2.0
// A worker that takes nothing more: who asks for it, who has to know, and when nothing is left.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <utility>

#include "absl/time/time.h"
#include "services/base/log.h"
#include "services/base/mutex.h"
#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"

namespace isthmus::worker {

class Drain {
 public:
  // Both must outlive it.
  Drain(PrefillService* prefill, DecodeService* decode) : prefill_(prefill), decode_(decode) {}

  // `on_begin` is called once, with the reason, when draining begins, or now if it has: to tell
  // routers. Must not come back here.
  void SetOnBegin(std::function<void(const std::string& reason)> on_begin) {
    MutexLock lock(mutex_);
    on_begin_ = std::move(on_begin);
    if (is_draining_) on_begin_(reason_);
  }

  // From now on nothing is taken. There is no way back but a restart.
  void Begin(const std::string& reason) {
    prefill_->Drain();
    decode_->Drain();
    MutexLock lock(mutex_);
    if (is_draining_.exchange(true)) return;
    reason_ = reason;
    LogInfo("draining", {{"reason", reason}, {"transfers", num_left()}});
    if (on_begin_) on_begin_(reason);
  }

  bool is_draining() const { return is_draining_; }

  // Transfers and calls that other processes still count on.
  int64_t num_left() const { return prefill_->num_calls() + decode_->num_transfers(); }

  // Returns when nothing is left, or after `patience`: the number that is left.
  int64_t AwaitIdle(absl::Duration patience) {
    // A worker has one role, so one of the two has nothing.
    return prefill_->num_calls() > 0 ? prefill_->AwaitIdle(patience) : decode_->AwaitIdle(patience);
  }

 private:
  PrefillService* const prefill_;
  DecodeService* const decode_;
  std::atomic<bool> is_draining_ = false;
  Mutex mutex_;
  std::function<void(const std::string& reason)> on_begin_;  // Guarded by mutex_.
  std::string reason_;                                       // Guarded by mutex_.
};

}  // namespace isthmus::worker
