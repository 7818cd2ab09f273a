// SPDX-License-Identifier: Apache-2.0
// The elementwise parts of the CPU path, row by row and vectorised; internal to experts_cpu.cc.
#pragma once

#include <cstdint>
#include <span>

namespace isthmus::kernels {

// g = silu(min(g, limit)) * clamp(u, -limit, limit) * weight, in place. With `round`, g and u are
// first rounded to bf16, as results of a linear, and so is the result. limit <= 0: no clamp.
void GateRow(float* g, const float* u, int64_t n, float limit, float weight, bool round);

// routed = the sum of `rows` in the order given; out = routed + shared (which may be null). With
// `round`, every row, `shared` and out are rounded to bf16. `routed` may be null.
void CombineRow(std::span<const float* const> rows, const float* shared, int64_t n, bool round,
                float* routed, float* out);

}  // namespace isthmus::kernels
