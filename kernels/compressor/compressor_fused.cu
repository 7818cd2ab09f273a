// SPDX-License-Identifier: Apache-2.0
// Patch compressor.fused_insert: a decode step's compressor in one launch (compressor_insert.cuh).
//
// Bound by latency: in most steps only a row is kept. An entry of ratio 128 and 512 channels is
// read from 512 KB of ring, by eight blocks.
#include "kernels/compressor/compressor_insert.cuh"
#include "kernels/core/workspace.h"

namespace isthmus::kernels {
namespace {

// Grid: [dim / kChannels, sequences]. Block: kThreads. Shared memory: SharedBytes, dynamic. pooled:
// [sequences][most new entries][dim].
__global__ __launch_bounds__(insert::kThreads, 1) void InsertFused(CompressorParams params,
                                                                   float* pooled, int most_entries,
                                                                   unsigned* counters) {
  LetSuccessorStart();
  WaitForPredecessor();
  insert::InsertPiece(params, static_cast<int>(blockIdx.x), blockIdx.y, pooled, most_entries,
                      counters);
}

}  // namespace

absl::Status LaunchCompressorFused(const CompressorArgs& args, const Exec& exec) {
  const DeviceBatch& batch = *args.device_batch;
  if (batch.rows == 0 || batch.num_sequences == 0) return absl::OkStatus();
  Workspace::Scope scope(exec.workspace);
  auto* pooled = scope.Take<float>(insert::PooledFloats(args));
  return Launch("InsertFused",
                {.grid = dim3(static_cast<unsigned>(args.dim / insert::kChannels),
                              static_cast<unsigned>(batch.num_sequences)),
                 .block = dim3(insert::kThreads),
                 .shared_bytes = insert::SharedBytes(args),
                 .overlaps_predecessor = true},
                exec, InsertFused, ParamsOf(args), pooled,
                static_cast<int>(insert::MostEntries(args)), exec.counters);
}

}  // namespace isthmus::kernels
