// SPDX-License-Identifier: Apache-2.0
// What happened in a cluster under test: events for people, violations that fail the test.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "services/base/mutex.h"

namespace isthmus::sim {

// Thread-safe.
class Journal {
 public:
  explicit Journal(std::function<void(absl::string_view)> note) : note_(std::move(note)) {}

  void Note(absl::string_view event) {
    if (note_) note_(event);
  }

  // Something that may happen and is worth knowing how often.
  void Count(const std::string& what, uint64_t times = 1) {
    MutexLock lock(mutex_);
    counts_[what] += times;
  }

  // Something that must never happen.
  void Violate(const std::string& text) {
    Note("VIOLATION: " + text);
    MutexLock lock(mutex_);
    violations_.push_back(text);
  }

  std::vector<std::string> violations() const {
    MutexLock lock(mutex_);
    return violations_;
  }
  std::map<std::string, uint64_t> counts() const {
    MutexLock lock(mutex_);
    return counts_;
  }

 private:
  const std::function<void(absl::string_view)> note_;
  mutable Mutex mutex_;
  std::vector<std::string> violations_;     // Guarded by mutex_.
  std::map<std::string, uint64_t> counts_;  // Guarded by mutex_.
};

}  // namespace isthmus::sim
