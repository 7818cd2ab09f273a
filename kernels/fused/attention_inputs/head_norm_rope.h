// SPDX-License-Identifier: Apache-2.0
// What stands between the projections of a layer and its attention, as one operation:
//
//   q[t, h, :] = Rope(RmsNorm(q[t, h, :]))                  without a weight, for every head
//   kv[t, :]   = RoundTripKv(Rope(RmsNorm(kv[t, :], kv_weight)))
//
// Shapes     q: [tokens, heads * head_dim]. kv: [tokens, head_dim]. kv_weight: [head_dim].
//            positions: [tokens]. frequency: [rope_dim / 2].
// Types, numerics, devices: those of rms_norm, rope and elementwise. The round trip is that of
//            reference arithmetic; math arithmetic has none. Every variant gives the same bits.
// Layout     Rows of kv may be strided, those of q only where a row is one head.
// Aliasing   Both are written in place; they may not overlap.
// Workspace  None.
// Phases     Prefill, decode.
// Errors     InvalidArgument  An argument breaks the contract of its operation.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct HeadNormRopeArgs {
  MatrixView q;  // [tokens, heads * head_dim], in place
  int64_t head_dim = 0;
  MatrixView kv;                       // [tokens, head_dim], in place
  VectorView kv_weight;                // [head_dim]
  std::span<const int64_t> positions;  // [tokens]
  std::span<const float> frequency;    // [rope_dim / 2]
  float epsilon = 1e-6f;
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status HeadNormRope(const HeadNormRopeArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
