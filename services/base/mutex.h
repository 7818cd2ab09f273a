// SPDX-License-Identifier: Apache-2.0
// Locks of the project. std::mutex and not absl::Mutex: Debian's abseil is not instrumented, so
// ThreadSanitizer would report races that do not exist.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>

namespace isthmus {

using Mutex = std::mutex;
using CondVar = std::condition_variable;

// Called by a thread that is about to take a lock, when set. A simulation sets it, so that another
// thread may go first: what two locks in a row guard is not one piece.
inline std::atomic<void (*)()> before_lock = nullptr;

// Of the calling thread. Who holds one must not stand still for others.
inline thread_local int num_held_locks = 0;

class MutexLock : public std::unique_lock<std::mutex> {
 public:
  explicit MutexLock(Mutex& mutex) : std::unique_lock<std::mutex>(Ask(mutex)) { ++num_held_locks; }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() { --num_held_locks; }

 private:
  static Mutex& Ask(Mutex& mutex) {
    if (void (*const ask)() = before_lock.load(std::memory_order_relaxed)) ask();
    return mutex;
  }
};

}  // namespace isthmus
