// SPDX-License-Identifier: Apache-2.0
// The lightning indexer: which compressed entries a query attends to (model specification 3.8).
//
//   score[t, j] = sum_h w[t, h] * relu(q[t, h] . key[j]),  j < (t + 1) / 4
//   topk[t]     = the min(topk, visible) largest, larger score first, then smaller j; -1 beyond
//
// Shapes     q: [rows, heads * dim] (after IndexQuery). w: [rows, heads], already scaled by
//            dim^-0.5 * heads^-0.5. selected: [rows, topk]. scores: optional [rows, scores_stride],
//            -infinity where j is not visible.
// Types      f32; selected i32. Keys in the format of key_plane: fp4 or f32, as the arithmetic has
//            them, or fp8 or bf16 (KvGeometry::index_key_format).
//            Without `scores`, a row that sees at most topk entries selects them all in ascending
//            order and computes no score: a selection is a set, only its dump has an order. On a
//            GPU every row without `scores` is selected in ascending order.
// Layout     `sequences` cut the rows as in attention.h; keys of this chunk are already written.
// Numerics   Dot products in ascending order of dim, heads in ascending order, f32. In reference
//            arithmetic the score is rounded to bf16 three times: the dot product, its product with
//            w, and the sum over heads. NaN scores sort last.
// Workspace  Scores of the rows in work, at most 32 MiB or one row; per thread 64 keys and one row
//            of 64-bit sort keys. On a GPU scores alone, at most 128 MiB or one row, each row as
//            long as the batch's max_tokens allow;
//            Exec::counters, where they are set.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract; topk < 1; dim above 256
//                             on a GPU.
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

struct IndexerArgs {
  MatrixView q;  // [rows, heads * dim]
  MatrixView w;  // [rows, heads]
  int64_t num_heads = 0;
  int64_t dim = 128;
  int64_t topk = 512;  // May exceed the number of entries.
  std::span<const SequenceKv> sequences;
  const DeviceBatch* device_batch = nullptr;  // On a GPU instead of `sequences`, which are empty.
  EntryPlane key_plane;
  int32_t* selected = nullptr;  // [rows, topk]
  float* scores = nullptr;      // [rows, scores_stride] or null
  int64_t scores_stride = 0;    // >= entries of the longest sequence when scores is set.
  Arithmetic arithmetic = Arithmetic::kReference;
};

absl::Status Indexer(const IndexerArgs& args, const Exec& exec);
absl::Status IndexerDefinition(const IndexerArgs& args, const Exec& exec);

// What a call has at most, for planning.
struct IndexerSize {
  int64_t rows = 0;
  int64_t sequences = 0;
  int64_t max_keys = 0;  // Of one sequence.
  int64_t topk = 0;
  int64_t dim = 128;
};
// Bytes of scratch that such calls without `scores` take on the CPU, at most.
int64_t IndexerScratchBytes(const IndexerSize& size, int threads);

// The index query after RoPE: Hadamard (Sylvester order, dim^-0.5) and the fp4 round trip per head,
// in place. Nothing in math arithmetic, where the transform is neutral.
absl::Status IndexQuery(const MatrixView& q, int64_t num_heads, int64_t dim, Arithmetic arithmetic,
                        const Exec& exec);

// The patches of the indexer, for the list of all (kernels/patches.h).
std::span<const Patch* const> IndexerPatches();

// Natural-order Walsh-Hadamard transform of x[n] times n^-0.5, in place; n a power of two. f32,
// butterflies in ascending stride: the bits of HadamardButterflies (kernels/core/hadamard.h).
void Hadamard(float* x, int64_t n);

}  // namespace isthmus::kernels
