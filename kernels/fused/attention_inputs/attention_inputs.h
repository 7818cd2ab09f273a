// SPDX-License-Identifier: Apache-2.0
// Everything between the projections of a layer and the choice of entries or, where a layer
// chooses none, its attention, as one operation. Its parts know nothing of one another:
//
//   HeadNormRope(heads)                                     queries and the latent entry
//   Compressor(compressor), Compressor(index_compressor)    what entries complete, and ring rows
//   q = IndexQuery(Rope(q)), weights = ScaleRows(weights)   the index query
//
// Shapes, types, layout, numerics, devices: those of the operations. Every variant gives the same
//            bits. Parts that a layer lacks: no compressor, no index_compressor, an index query
//            without data.
// Aliasing   No two parts touch the same memory.
// Workspace  That of the parts; in one launch that of Compressor for both, and 2 * sequences words
//            of Exec::counters.
// Phases     Prefill, decode.
// Errors     InvalidArgument  An argument breaks the contract of its operation.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <optional>
#include <span>

#include "absl/status/status.h"
#include "kernels/compressor/compressor.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/fused/attention_inputs/head_norm_rope.h"

namespace isthmus::kernels {

struct IndexQueryArgs {
  MatrixView q;        // [tokens, num_heads * dim], in place; no data: the layer has none
  MatrixView weights;  // [tokens, num_heads], in place
  int64_t num_heads = 0;
  int64_t dim = 128;
  float weight_scale = 1.0f;
  std::span<const int64_t> positions;  // [tokens]
  std::span<const float> frequency;    // [rope_dim / 2]
  Arithmetic arithmetic = Arithmetic::kReference;
};

struct AttentionInputsArgs {
  HeadNormRopeArgs heads;
  std::optional<CompressorArgs> compressor;
  std::optional<CompressorArgs> index_compressor;
  IndexQueryArgs index_query;
};

absl::Status AttentionInputs(const AttentionInputsArgs& args, const Exec& exec);

// Of both operations of this folder.
std::span<const Patch* const> AttentionInputsPatches();

}  // namespace isthmus::kernels
