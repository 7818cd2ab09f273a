// SPDX-License-Identifier: Apache-2.0
// A worker that takes nothing more: who asks for it, who has to know, and when nothing is left.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "absl/time/time.h"
#include "services/base/log.h"
#include "services/worker/decode_service.h"
#include "services/worker/prefill_service.h"

namespace isthmus::worker {

class Drain {
 public:
  // Both must outlive it.
  Drain(PrefillService* prefill, DecodeService* decode) : prefill_(prefill), decode_(decode) {}

  // Called once, with the reason, when draining begins: to tell routers. Set before the first
  // Begin.
  std::function<void(const std::string& reason)> on_begin;

  // From now on nothing is taken. There is no way back but a restart.
  void Begin(const std::string& reason) {
    prefill_->Drain();
    decode_->Drain();
    if (is_draining_.exchange(true)) return;
    LogInfo("draining", {{"reason", reason}, {"transfers", num_left()}});
    if (on_begin) on_begin(reason);
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
};

}  // namespace isthmus::worker
