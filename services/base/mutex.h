// SPDX-License-Identifier: Apache-2.0
// Locks of the project. std::mutex and not absl::Mutex: Debian's abseil is not instrumented, so
// ThreadSanitizer would report races that do not exist.
#pragma once

#include <condition_variable>
#include <mutex>

namespace isthmus {

using Mutex = std::mutex;
using MutexLock = std::unique_lock<std::mutex>;
using CondVar = std::condition_variable;

}  // namespace isthmus
