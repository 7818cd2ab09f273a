// SPDX-License-Identifier: Apache-2.0
// Which rows of a state slot mean something: the rest of a ring is what earlier tokens left behind.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/core/kv_layout.h"

namespace isthmus::kernels {

// Position of the oldest row of a fixed-size kind that tokens behind the first `num_tokens` may
// still read (model specification 4.4); rows from there to num_tokens - 1 are the kind's whole
// state. Equal to `num_tokens` when there is none.
inline int64_t OldestStateRow(const KvLayout& layout, CacheKindIndex kind, int64_t num_tokens) {
  switch (kind) {
    case kWindow:
      return std::max<int64_t>(0, num_tokens - layout.geometry.window);
    case kCsaState:
    case kIndexState:  // The previous entry's rows overlap with the next one.
      return std::max<int64_t>(0, num_tokens / 4 * 4 - 4);
    case kHcaState:
      return num_tokens / 128 * 128;
    default:
      return num_tokens;
  }
}

}  // namespace isthmus::kernels
