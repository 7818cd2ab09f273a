// SPDX-License-Identifier: Apache-2.0
// A draw of a token that whoever computes a row of logits may make itself.
#pragma once

#include <cstdint>

namespace isthmus::model {

// From one row of logits, as kernels::Sample draws it (kernels/sampling/sampling.h).
struct RowDraw {
  float temperature = 0.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;
  float min_p = 0.0f;
  uint64_t seed = 0;
  uint64_t counter = 0;
};

// In place of a token: the row has its logits, and nobody has drawn from them yet.
inline constexpr int32_t kNotDrawn = -2;

}  // namespace isthmus::model
