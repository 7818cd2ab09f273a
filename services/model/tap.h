// SPDX-License-Identifier: Apache-2.0
// Looking into a forward pass: every named intermediate, as it is computed. Null in serving; dump,
// diff and isolation are built on it. The names are those of the golden files: attn_in, qr, q, kv,
// compressed_kv, index_keys, index_q, index_weights, index_scores, topk, attn_core, attn_z,
// attn_out, ffn_in, router_scores, router_ids, router_weights, routed_out, ffn_out, streams,
// hc_attn_post, hc_attn_comb, hc_ffn_post, hc_ffn_comb, and logits (layer -1).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/strings/string_view.h"
#include "kernels/core/tensor.h"

namespace isthmus::model {

struct TapTensor {
  int layer = -1;  // -1: not of a layer.
  absl::string_view name;
  kernels::DType dtype = kernels::DType::kF32;  // kF32 or kI32.
  std::vector<int64_t> shape;    // First axis: rows of the batch, or new entries of its sequences.
  const void* values = nullptr;  // Contiguous; valid during the call only.
};

struct Tap {
  // Called for every tensor, on the thread that runs the pass.
  std::function<void(const TapTensor&)> on_tensor;

  // When set: replaces the residual streams that `layer` starts from, [rows, 4 * hidden]; null
  // keeps the pass's own. Rows are those of the batch.
  std::function<const float*(int layer)> input_streams;
};

}  // namespace isthmus::model
