// SPDX-License-Identifier: Apache-2.0
// Sparse attention of one layer over one shared latent per position (keys = values):
//
//   s[h, k] = scale * q[t, h] . kv[k]
//   p[h, k] = exp(s - M) / (sum_k exp(s - M) + exp(sink[h] - M)),  M = max_k s (without the sink)
//   out[t, h] = sum_k p[h, k] * kv[k]
//
// over the union, in one softmax, of
//   window      positions max(0, t - window + 1) .. t
//   compressed  entries j < (t + 1) / ratio: all of them (selected == null) or those in selected[t]
//
// Shapes     q, out: [rows, heads * head_dim]. chunk_kv: [rows, head_dim]. sink: [heads].
//            selected: [rows, max_selected], -1 = none; each entry at most once, any order.
// Types      f32; selected i32. Entries in the formats of their planes. On a GPU q and out may be
//            bf16.
// Layout     `sequences` cut the rows: each owns rows [first_row, first_row + num_rows), which are
//            its positions start_position ... Positions before start_position are read from the
//            window ring in its state slot (slot = position mod window), the others from chunk_kv,
//            so a chunk may be longer than the ring. Entries completed in this chunk must have been
//            written. After attending, the chunk's last `window` rows are committed to the ring.
//            chunk_kv holds values after the cache round trip; encoding them again is exact.
//            On a GPU pages and state slots begin at multiples of 16 bytes.
// Aliasing   out may be q. Nothing else may overlap.
// Numerics   Dot products have 16 partial sums over head_dim; the denominator has 16 partial sums
//            over keys; values are summed key by key: window in order of position, then entries in
//            order of index. In reference arithmetic p's numerator is rounded to bf16 before the
//            value product, the denominator is not, and out is rounded to bf16 (specification
//            2.8, 3.5). One pass, no running maximum.
// Workspace  Per thread: keys * (head_dim + 8) floats. Decoded windows of sequences with several
//            rows, and at most 64 MiB of decoded entries that their rows share.
//            On a GPU, per block of the grid: 4 heads of scores and the selected list.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/device_batch.h"
#include "kernels/core/exec.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct AttentionArgs {
  MatrixView q;         // [rows, heads * head_dim]
  MatrixView chunk_kv;  // [rows, head_dim]
  MatrixView out;       // [rows, heads * head_dim]; may be q
  VectorView sink;      // [heads]
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t rope_dim = 64;
  float scale = 0.0f;
  int64_t window = 128;  // Positions a query sees, itself included.
  int64_t ratio = 0;     // 0: no compressed entries.

  std::span<const SequenceKv> sequences;
  const DeviceBatch* device_batch = nullptr;  // On a GPU instead of `sequences`, which are empty.
  EntryPlane window_plane;                    // In the state slot.
  EntryPlane entry_plane;                     // In pages of `entry_kind`; unused when ratio is 0.
  CacheKindIndex entry_kind = kCsaKv;         // kCsaKv or kHcaKv.
  const int32_t* selected = nullptr;          // [rows, max_selected], or null
  int64_t max_selected = 0;
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status Attention(const AttentionArgs& args, const Exec& exec);
// What a call has at most, for planning.
struct AttentionSize {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t max_tokens = 0;  // Of one sequence, with its cache.
  int64_t window = 128;
  int64_t ratio = 0;
  int64_t max_selected = 0;  // Ratio 4.
  int64_t head_dim = 0;
  bool stores_f32 = false;  // The cache, as in math arithmetic.
};
// Bytes of scratch that such calls take on the CPU, at most.
int64_t AttentionScratchBytes(const AttentionSize& size, int threads);

std::span<const Patch* const> AttentionPatches();
// Works on the same caches but commits nothing to the ring.
absl::Status AttentionDefinition(const AttentionArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
