// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding on the last `rope_dim` elements of each head, interleaved pairs:
//
//   (x[2i], x[2i+1]) <- (a cos - b sin, a sin + b cos),  angle = position * frequency[i]
//
// inverse rotates by -angle (the attention output, at the query's position).
//
// Shapes     x: [tokens, heads * head_dim], rotated in place. positions: [tokens].
//            frequency: [rope_dim / 2].
// Types      x, frequency: f32. positions: i64, below 2^31.
// Layout     Rows may be strided.
// Numerics   Frequencies and angle in f32 as the author's code builds them (the position is
//            converted to f32, then multiplied); sin and cos of that f32
//            angle with full range reduction (model specification 3.3), rounded to f32; the
//            rotation in f32. In reference arithmetic the rotated elements are rounded to bf16.
//            The trusted path of a GPU has the bits of the CPU's.
// Devices    positions and frequency are device memory; positions are not checked there.
// Workspace  None: a table of one token, at most 64 pairs, lies on the stack.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract, or a position
//                             is outside [0, 2^31).
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct RopeTableParams {
  int rope_dim = 64;
  double theta = 10000.0;
  // YaRN; original_positions == 0 switches it off. No attention-temperature factor exists.
  int64_t original_positions = 0;
  double factor = 16.0;
  double beta_fast = 32.0;
  double beta_slow = 1.0;
};

// The f32 frequencies [rope_dim / 2], in the author's order of operations.
std::vector<float> RopeFrequencies(const RopeTableParams& params);

struct RopeArgs {
  MatrixView x;  // [tokens, heads * head_dim], in place
  int64_t head_dim = 0;
  std::span<const int64_t> positions;  // [tokens]
  std::span<const float> frequency;    // [rope_dim / 2]
  bool inverse = false;
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status Rope(const RopeArgs& args, const Exec& exec);
absl::Status RopeDefinition(const RopeArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
