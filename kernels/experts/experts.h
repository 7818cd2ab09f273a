// SPDX-License-Identifier: Apache-2.0
// Routed and shared experts (model specification 5.2 to 5.4):
//
//   g = round(w1 q(x)), u = round(w3 q(x)); g = min(g, limit); u = clamp(u, -limit, limit)
//   h = round( silu(g) * u * weight )        weight: the routing weight (1 for the shared expert)
//   y_e = round( w2 q(h) )
//   routed[t] = sum over its experts, in ascending expert id, f32;  out = round(routed + shared)
//
// The routing weight already contains route_scale, exactly once.
//
// Shapes     x, out: [tokens, hidden]. ids, weights: [tokens, k], ids distinct per token.
//            w1, w3: [intermediate, hidden]; w2: [hidden, intermediate].
// Types      f32; ids i32; weights of experts in any WeightFormat.
// Aliasing   out may be x. routed, when given, is separate.
// Numerics   q and round as in linear.h (reference arithmetic: fp8 and fp4 weights quantise their
//            input; results are bf16), nothing in math. The clamp acts on real values. limit <= 0
//            means no clamp. silu in f32.
// Workspace  tokens * (k + 1) * (hidden + 2 * intermediate) + tokens * hidden floats.
// Phases     Prefill, decode.
// On a GPU   ids, weights and what the views point to are device memory, and nobody checks ids. A
//            token whose ids are all -1 is padding: its rows of out and routed stay as they are.
//            `experts` and `shared` are host structs; `device_experts` is the copy that kernels
//            read. Experts without elements may not be named.
// Errors     InvalidArgument  A shape breaks this contract; on the CPU also an id outside
//                             [0, experts), or a token that names an expert twice.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

struct ExpertWeights {
  WeightView w1;  // [intermediate, hidden], gate projection
  WeightView w3;  // [intermediate, hidden], up projection
  WeightView w2;  // [hidden, intermediate], down projection
};

struct ExpertsArgs {
  MatrixView x;                    // [tokens, hidden]
  const int32_t* ids = nullptr;    // [tokens, k]
  const float* weights = nullptr;  // [tokens, k]
  int64_t k = 0;
  std::span<const ExpertWeights> experts;  // [num_experts], the array itself on the host
  // On a GPU: the same array in device memory.
  const ExpertWeights* device_experts = nullptr;
  const ExpertWeights* shared = nullptr;  // Null: none.
  float limit = 10.0f;                    // Clamp of the routed experts.
  float shared_limit = 10.0f;             // Clamp of the shared expert (specification 5.4).
  MatrixView out;                         // [tokens, hidden]; may be x
  MatrixView routed;                      // Optional [tokens, hidden]: before the shared expert.
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status Experts(const ExpertsArgs& args, const Exec& exec);
// What a call has, for planning.
struct ExpertsSize {
  int64_t tokens = 0;
  int64_t k = 0;
  int64_t num_experts = 0;
  int64_t hidden = 0;
  int64_t intermediate = 0;
  bool has_shared = false;
  bool quantises = false;  // The arithmetic and the format of any expert ask for it.
};
// Bytes of scratch that it takes on the CPU, at most: whatever experts the tokens choose.
int64_t ExpertsScratchBytes(const ExpertsSize& size, int threads);

// The patches of this operation (kernels/patches.h).
std::span<const Patch* const> ExpertsPatches();
absl::Status ExpertsDefinition(const ExpertsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
