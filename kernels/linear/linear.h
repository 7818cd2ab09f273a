// SPDX-License-Identifier: Apache-2.0
// Linear layer without bias:
//
//   out[t, n] = round( sum_k q(x[t, k]) * w[n, k] )
//
// Shapes     x: [tokens, K]. w: [N, K]. out: [tokens, N].
// Types      x, out: f32. w: any WeightFormat.
// Layout     Rows may be strided (a column slice of a wider matrix is a valid x or out).
// Aliasing   Nothing may overlap.
// Numerics   q is the e4m3 1x128 power-of-two round trip when quantise_input is set (reference
//            arithmetic, fp8 and fp4 weights; model specification 2.7), else the identity. Sums as
//            in kernels/core/gemm.h; the trusted path of a GPU has the bits of the CPU's. round is
//            to bf16 when round_output is set, else nothing.
// Workspace  tokens * K floats when quantise_input is set. On a GPU the patches take the tokens
//            once more in the form of their operands, 256 MB at most, and partial sums: 135 KB a
//            multiprocessor and Exec::counters.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

struct LinearArgs {
  MatrixView x;  // [tokens, K]
  WeightView weight;
  MatrixView out;  // [tokens, N]
  bool quantise_input = false;
  bool round_output = false;
  // x went through QuantiseActivation: quantising it once more would not change it, so that a
  // kernel may multiply its codes.
  bool input_is_quantised = false;
};

absl::Status Linear(const LinearArgs& args, const Exec& exec);
// Independent linears, each as Linear has it; no output may overlap anything. Neighbours of one K,
// format and number of tokens may be one launch.
absl::Status LinearMany(std::span<const LinearArgs> linears, const Exec& exec);
absl::Status LinearDefinition(const LinearArgs& args, const Exec& exec);

// Bytes of scratch that a linear of `rows` tokens takes on the CPU.
int64_t LinearScratchBytes(int64_t rows, int64_t inputs, bool quantises_input, int threads);

std::span<const Patch* const> LinearPatches();

// out = the e4m3 1x128 round trip of x, for an input that several linears share: quantise once and
// call them with quantise_input = false. out may be x.
absl::Status QuantiseActivation(const MatrixView& x, const MatrixView& out, const Exec& exec);

}  // namespace isthmus::kernels
