// SPDX-License-Identifier: Apache-2.0
// RMSNorm over the last axis:
//
//   out[t, d] = round( x[t, d] / sqrt(mean(x[t, :]^2) + epsilon) * weight[d] )
//
// Shapes     x, out: [tokens, hidden]. weight: [hidden], or empty: no weight (the per-head query
//            norm).
// Types      x, weight, out: f32. The weight is stored as bf16 and held as f32.
// Layout     Rows may be strided. The last axis is contiguous.
// Aliasing   out may be x. Nothing else may overlap.
// Numerics   The sum of squares has 16 partial sums in f32. In reference arithmetic the result is
//            rounded once to bf16 (model specification 2.6, 3.1). The trusted path of a GPU has
//            the bits of the CPU's.
// Workspace  None.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct RmsNormArgs {
  MatrixView x;       // [tokens, hidden]
  VectorView weight;  // [hidden], or size 0
  MatrixView out;     // [tokens, hidden]; may be x
  float epsilon = 1e-6f;
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status RmsNorm(const RmsNormArgs& args, const Exec& exec);
absl::Status RmsNormDefinition(const RmsNormArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
