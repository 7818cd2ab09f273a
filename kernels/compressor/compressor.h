// SPDX-License-Identifier: Apache-2.0
// The compressor: gated pooling of token rows into cache entries (model specification 3.7, 3.9).
//
// Row of position t: u = Wkv x, g = Wgate x + ape[t mod ratio]. Entry j:
//   ratio 128: per channel, softmax over the 128 rows of g, then the weighted sum of u.
//   ratio 4:   8 rows, the previous window's four with channels [0, dim), the current window's four
//              with channels [dim, 2 dim). For j = 0 the previous four contribute nothing.
// then round -> RMSNorm(norm_weight) -> RoPE on the last rope_dim at position ratio * j -> the
// cache round trip: fp8 of the other dims in blocks of 64 (main), or Hadamard and fp4 in blocks of
// 32 (indexer; or fp8 with one scale, or nothing after bf16, as the format of entry_plane says).
// Neither in math arithmetic.
//
// Shapes     u, g: [rows, width], width = dim (ratio 128) or 2 * dim (ratio 4); g without ape on
//            entry. ape: [ratio, width]. norm_weight: [dim]. frequency: [rope_dim / 2].
// Types      f32. State rows are f32 (kStateRow); entries in the format of entry_plane.
// Layout     `sequences` cut the rows as in attention.h. Rows before start_position are read from
//            the state ring (slot = position mod 8, or mod 128), the others from u and g. Every
//            entry that completes in this chunk is written to its page; then the rows that future
//            entries will still read are written to the ring (ratio 4: from position
//            4 * floor(end / 4) - 4; ratio 128: from 128 * floor(end / 128)).
//            Rows that are not stored read as u = 0, g = -infinity.
// Aliasing   Nothing may overlap. g is overwritten on the CPU (ape is added in place).
// Numerics   f32; g + ape rounded once to f32; rows summed in ascending order; in reference
//            arithmetic bf16 after pooling, after the norm, after RoPE and after Hadamard.
// Outputs    Optional `entries` and `entry_row`: decoded values of the new entries, see below.
// Workspace  Per thread: dim floats. 4 bytes per row, 16 per new entry. Fused: the new entries as
//            f32, and Exec::counters.
// Phases     Prefill, decode.
// Errors     InvalidArgument  A shape, type or stride breaks this contract.
//            Unimplemented    No enabled variant supports this architecture.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/arithmetic.h"
#include "kernels/core/device_batch.h"
#include "kernels/core/exec.h"
#include "kernels/core/host_device.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

struct CompressorArgs {
  MatrixView u;                      // [rows, width]
  MatrixView g;                      // [rows, width]; ape is added in place
  MatrixView ape;                    // [ratio, width]
  VectorView norm_weight;            // [dim]
  std::span<const float> frequency;  // [rope_dim / 2]
  int64_t dim = 0;                   // head_dim, or index_head_dim.
  int64_t rope_dim = 64;
  int64_t ratio = 4;  // 4 or 128
  float epsilon = 1e-6f;
  bool is_index_key = false;  // Hadamard, then the format of entry_plane.

  std::span<const SequenceKv> sequences;
  const DeviceBatch* device_batch = nullptr;  // On a GPU instead of `sequences`, which are empty.
  EntryPlane entry_plane;                     // In pages of entry_kind.
  CacheKindIndex entry_kind = kCsaKv;
  EntryPlane state_plane;  // In the state slot.
  // When not null: decoded values [new entries of all sequences, in order][dim].
  float* entries = nullptr;
  Arithmetic arithmetic = Arithmetic::kReference;
};

// Entries that complete when a sequence grows from `start` to `end` tokens.
ISTHMUS_HOST_DEVICE inline int64_t NewEntries(int64_t start, int64_t end, int64_t ratio) {
  return end / ratio - start / ratio;
}

absl::Status Compressor(const CompressorArgs& args, const Exec& exec);
// Bytes of scratch that it takes on the CPU, at most.
int64_t CompressorScratchBytes(int64_t rows, int64_t sequences, int64_t ratio, int64_t dim,
                               int threads);
std::span<const Patch* const> CompressorPatches();
// Works on the same caches but writes only `entries` (which must not be null).
absl::Status CompressorDefinition(const CompressorArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
