// SPDX-License-Identifier: Apache-2.0
// A bounded queue between threads: a full one refuses, a closed one drains, and no wait is endless.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/mutex.h"

namespace isthmus {

template <typename T>
class BoundedQueue {
 public:
  // `clock` must outlive the queue; waits are its.
  explicit BoundedQueue(size_t capacity, Clock& clock = RealClock())
      : capacity_(capacity), clock_(clock) {}

  // False when the queue is full or closed; `item` is then untouched.
  bool TryPush(T&& item) {
    {
      MutexLock lock(mutex_);
      if (is_closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    ready_.notify_one();
    return true;
  }

  // The oldest item; nothing when `timeout` passed, or when the queue is closed and empty.
  std::optional<T> PopFor(absl::Duration timeout) {
    MutexLock lock(mutex_);
    if (items_.empty() && timeout > absl::ZeroDuration()) {
      clock_.WaitFor(ready_, lock, timeout, [this] { return is_closed_ || !items_.empty(); });
    }
    if (items_.empty()) return std::nullopt;
    std::optional<T> item(std::move(items_.front()));
    items_.pop_front();
    return item;
  }

  // No more pushes; what is inside can still be popped. Wakes every waiter.
  void Close() {
    {
      MutexLock lock(mutex_);
      is_closed_ = true;
    }
    ready_.notify_all();
  }

  bool is_closed() const {
    MutexLock lock(mutex_);
    return is_closed_;
  }
  size_t size() const {
    MutexLock lock(mutex_);
    return items_.size();
  }
  size_t capacity() const { return capacity_; }

 private:
  const size_t capacity_;
  Clock& clock_;
  mutable Mutex mutex_;
  CondVar ready_;
  std::deque<T> items_;     // Guarded by mutex_.
  bool is_closed_ = false;  // Guarded by mutex_.
};

}  // namespace isthmus
