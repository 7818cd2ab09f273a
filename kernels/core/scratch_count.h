// SPDX-License-Identifier: Apache-2.0
// What a Workspace in host memory would have to hold, added up without one: for memory plans. An
// operation's count stands beside its takes and is made of the same numbers, so that whoever
// changes one sees the other; services/model/step_memory_test.cc holds the sum against what steps
// really take.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/core/workspace.h"

namespace isthmus::kernels {

class ScratchCount {
 public:
  // As Workspace::Scope::Take.
  template <typename T>
  void Take(int64_t count) {
    used_ += Workspace::RoundedBytes(count * static_cast<int64_t>(sizeof(T)));
    peak_ = std::max(peak_, used_);
  }
  // What is given back again before anything else is taken: an operation, a half layer.
  void Lend(int64_t bytes) { peak_ = std::max(peak_, used_ + bytes); }

  // The most that was held at a time.
  int64_t peak_bytes() const { return peak_; }

 private:
  int64_t used_ = 0;
  int64_t peak_ = 0;
};

}  // namespace isthmus::kernels
