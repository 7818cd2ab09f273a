// SPDX-License-Identifier: Apache-2.0
// A thread that ends before its owner does and that a simulated clock can schedule. What runs in it
// must wait through the same clock alone.
#pragma once

#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "services/base/clock.h"
#include "services/base/mutex.h"

namespace isthmus {

class Thread {
 public:
  // No thread yet.
  Thread() = default;

  // Runs `body` at once. `clock` must outlive the thread.
  Thread(Clock& clock, std::function<void()> body) : clock_(&clock), end_(new End) {
    // The end is told inside what the clock adopts: who waits for it may be simulated as well.
    std::function<void()> whole = [body = std::move(body), end = end_] {
      body();
      MutexLock lock(end->mutex);
      end->has_come = true;
      end->changed.notify_all();
    };
    thread_ = std::thread(clock.Adopt(std::move(whole)));
  }
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) noexcept {
    Join();
    clock_ = other.clock_;
    end_ = std::move(other.end_);
    thread_ = std::move(other.thread_);
    return *this;
  }
  ~Thread() { Join(); }

  bool is_running() const {
    if (end_ == nullptr) return false;
    MutexLock lock(end_->mutex);
    return !end_->has_come;
  }

  // Waits for the end of the body. Further calls do nothing.
  void Join() {
    if (!thread_.joinable()) return;
    {
      MutexLock lock(end_->mutex);
      while (!clock_->WaitFor(end_->changed, lock, absl::Hours(1),
                              [this] { return end_->has_come; })) {
      }
    }
    thread_.join();
  }

 private:
  struct End {
    Mutex mutex;
    CondVar changed;
    bool has_come = false;  // Guarded by mutex.
  };

  Clock* clock_ = nullptr;
  std::shared_ptr<End> end_;
  std::thread thread_;
};

}  // namespace isthmus
