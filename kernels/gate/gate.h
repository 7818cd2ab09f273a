// SPDX-License-Identifier: Apache-2.0
// The MoE gate: which experts a token uses, and with what weight (model specification 5.1).
//
//   a[t, e] = sqrt(softplus(logits[t, e]))
//   ids[t]  = the k largest of a + bias (bias for the choice only; larger first, then smaller id),
//             or hash_ids[token_ids[t]] in hash layers
//   weights[t, i] = a[t, ids[i]] / sum_i a[t, ids[i]] * route_scale
//
// Shapes     logits, scores: [tokens, experts]. bias: [experts]. hash_ids: [vocab, k].
//            token_ids: [tokens]. ids, weights: [tokens, k]; k at most 64.
// Types      f32; ids i32; hash_ids i64 as stored.
// Aliasing   scores may be logits.
// Numerics   a in f64, rounded to f32. The sum in ascending i, f32; a sum of 0 divides as 1e-20.
//            NaN sorts last.
// Devices    All arrays are device memory. Where token_ids is given, in any layer, a row whose
// token
//            is -1 is padding: its ids are -1 and its weights 0, its scores are not written. Tokens
//            and table entries are not checked; one out of range gives the id -1 and the weight 0.
//            The trusted path has the bits of the CPU's.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape breaks this contract, a token id is outside the table, or a
//                             table entry is outside [0, experts).
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct GateArgs {
  MatrixView logits;                   // [tokens, experts]
  MatrixView scores;                   // [tokens, experts], out: a; may be logits
  VectorView bias;                     // [experts], or size 0 in hash layers
  std::span<const int64_t> hash_ids;   // [vocab * k], or empty
  std::span<const int32_t> token_ids;  // [tokens]; on a CPU read in hash layers only
  int64_t k = 0;
  float route_scale = 1.0f;
  int32_t* ids = nullptr;    // [tokens, k], out
  float* weights = nullptr;  // [tokens, k], out
};

absl::Status Gate(const GateArgs& args, const Exec& exec);
absl::Status GateDefinition(const GateArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
