// SPDX-License-Identifier: Apache-2.0
// Work on single rows that no larger operation of the forward pass contains:
//
//   EmbedTokens   streams[t, m, :] = table[tokens[t], :] for every residual stream m
//   GatherRows    out[r, :] = x[rows[r], :]
//   RoundTripKv   x[t, d] = its fp8 round trip in blocks of 64, for d < cols - rope_dim
//   ScaleRows     x[t, d] = round(x[t, d] * scale)
//
// Shapes     table: [vocab, hidden], bf16, kRowMajor. streams: [tokens, streams * hidden].
//            rows: [out.rows].
// Types      f32 matrices; i32 tokens and rows. A negative token or row is one of padding: zeros.
// Layout     Rows may be strided. cols - rope_dim is a multiple of 64.
// Aliasing   Nothing may overlap; RoundTripKv and ScaleRows work in place.
// Numerics   Exact, but for the round trip (model specification 3.2), which has the bits of
//            EncodeKvEntry and DecodeKvEntry, and ScaleRows, which rounds to bf16 in reference
//            arithmetic. Every architecture gives the same bits.
// Workspace  None.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    This build has no kernels for the architecture.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

struct EmbedTokensArgs {
  const int32_t* tokens = nullptr;  // [streams.rows]
  WeightView table;                 // [vocab, hidden]
  MatrixView streams;               // [tokens, streams * hidden], out
};
absl::Status EmbedTokens(const EmbedTokensArgs& args, const Exec& exec);

struct GatherRowsArgs {
  MatrixView x;                   // [any, cols]
  const int32_t* rows = nullptr;  // [out.rows]
  MatrixView out;                 // [out.rows, cols]
};
absl::Status GatherRows(const GatherRowsArgs& args, const Exec& exec);

struct RoundTripKvArgs {
  MatrixView x;  // [tokens, head_dim], in place
  int64_t rope_dim = 64;
};
absl::Status RoundTripKv(const RoundTripKvArgs& args, const Exec& exec);

struct ScaleRowsArgs {
  MatrixView x;  // [tokens, any], in place
  float scale = 1.0f;
  Arithmetic arithmetic = Arithmetic::kReference;
};
absl::Status ScaleRows(const ScaleRowsArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
