// SPDX-License-Identifier: Apache-2.0
// Patch compressor.fused_insert: a decode step's compressor in one launch. A block has 64 channels
// of one sequence (of both halves of a row, where windows overlap), so that the ring rows it reads
// are those it writes, and a barrier of its own orders the two. The last block of a sequence to
// come finishes the entry: norm, rotation, transform, encoding, insertion.
//
// Bound by latency: in most steps only a row is kept. An entry of ratio 128 and 512 channels is
// read from 512 KB of ring, by eight blocks. The order of every sum is the CPU's.
#include "kernels/compressor/compressor_device.cuh"
#include "kernels/core/workspace.h"

namespace isthmus::kernels {
namespace {

constexpr int kChannels = 64;
constexpr int kParts = 4;  // Threads of a channel; rows are dealt to them in turn.
constexpr int kThreads = kChannels * kParts;

// The rows of one entry in the block's channels, in shared memory.
struct PooledRows {
  float* u;        // [rows][kChannels]
  float* g;        // [rows][kChannels], later the weights
  float* largest;  // [kParts][kChannels]
};

__device__ __forceinline__ PooledRows RowsIn(float* shared, int rows) {
  return {shared, shared + rows * kChannels, shared + 2 * rows * kChannels};
}

// Loads the rows of entry j, and the largest gate of each part.
__device__ __forceinline__ void LoadRows(const CompressorParams& params, const DeviceSequence& seq,
                                         int64_t j, int64_t begin, int count,
                                         const PooledRows& rows) {
  const int c = static_cast<int>(threadIdx.x) % kChannels;
  const int part = static_cast<int>(threadIdx.x) / kChannels;
  const int64_t d = int64_t{blockIdx.x} * kChannels + c;
  const int64_t current = params.ratio * j;
  float largest = -INFINITY;
#pragma unroll 8
  for (int k = part; k < count; k += kParts) {
    const int64_t p = begin + k;
    const int64_t channel = params.ratio == 4 && p >= current ? params.dim + d : d;
    const PoolRow row = RowValue(params, seq, p);
    const float g = p < seq.start_position ? row.g[channel] : GateOf(params, row.g, p, channel);
    rows.g[k * kChannels + c] = g;
    rows.u[k * kChannels + c] = row.u[channel];
    largest = fmaxf(g, largest);
  }
  rows.largest[part * kChannels + c] = largest;
}

// One channel a thread of the first part: the pooled value into z.
__device__ __forceinline__ void PoolRows(const CompressorParams& params, int count,
                                         const PooledRows& rows, float* z) {
  const int c = static_cast<int>(threadIdx.x) % kChannels;
  const int part = static_cast<int>(threadIdx.x) / kChannels;
  float largest = rows.largest[c];
#pragma unroll
  for (int i = 1; i < kParts; ++i) largest = fmaxf(rows.largest[i * kChannels + c], largest);
  for (int k = part; k < count; k += kParts) {
    rows.g[k * kChannels + c] = Exp(rows.g[k * kChannels + c] - largest);
  }
  __syncthreads();
  if (part == 0) {
    float numerator = 0.0f;
    float denominator = 0.0f;
#pragma unroll 8
    for (int k = 0; k < count; ++k) {
      const float weight = rows.g[k * kChannels + c];
      numerator = fmaf(weight, rows.u[k * kChannels + c], numerator);
      denominator = denominator + weight;
    }
    const float pooled = numerator / denominator;
    z[blockIdx.x * kChannels + c] = params.is_reference ? RoundBf16(pooled) : pooled;
  }
  __syncthreads();  // Before the rows of the next entry.
}

// Row r, at position p, of the block's channels into the ring, when a later entry reads it.
__device__ __forceinline__ void KeepChannels(const CompressorParams& params,
                                             const DeviceSequence& seq, int64_t r, int64_t p) {
  const int c = static_cast<int>(threadIdx.x) % kChannels;
  const int half = static_cast<int>(threadIdx.x) / kChannels;
  if (half >= params.width / params.dim) return;
  const int first = half * params.dim + static_cast<int>(blockIdx.x) * kChannels + c;
  KeepRow(params, seq, r, p, first, params.width);
}

// Grid: [dim / kChannels, sequences]. Block: kThreads. Shared memory: the rows of an entry or, for
// the last block, an entry, dynamic. pooled: [sequences][most new entries][dim].
__global__ __launch_bounds__(kThreads, 1) void InsertFused(CompressorParams params, float* pooled,
                                                           int most_entries, unsigned* counters) {
  __shared__ float partial[16];
  __shared__ unsigned turn;
  auto* shared = reinterpret_cast<float*>(DynamicShared());
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t s = blockIdx.y;
  const DeviceSequence& seq = params.batch.sequences[s];
  const int64_t first_entry = seq.start_position / params.ratio;
  const int64_t end_entry = (seq.start_position + seq.num_rows) / params.ratio;
  float* z = pooled + s * most_entries * params.dim;
  for (int64_t j = first_entry; j < end_entry; ++j) {
    const int64_t begin = FirstPooledPosition(j, params.ratio);
    const int count = static_cast<int>(params.ratio * (j + 1) - begin);
    const PooledRows rows = RowsIn(shared, count);
    LoadRows(params, seq, j, begin, count, rows);
    __syncthreads();
    PoolRows(params, count, rows, z + (j - first_entry) * params.dim);
  }
  for (int64_t i = 0; i < seq.num_rows; ++i) {
    KeepChannels(params, seq, seq.first_row + i, seq.start_position + i);
  }
  if (first_entry == end_entry) return;  // In all blocks of the sequence.
  if (TakeTurn(counters + s, gridDim.x, &turn) != gridDim.x - 1) return;
  for (int64_t j = first_entry; j < end_entry; ++j) {
    for (int d = static_cast<int>(threadIdx.x); d < params.dim; d += kThreads) {
      shared[d] = __ldcg(z + (j - first_entry) * params.dim + d);
    }
    __syncthreads();
    float* entry_out = nullptr;
    if (params.entries != nullptr) {
      entry_out = params.entries + EntryNumber(params, s, j) * params.dim;
    }
    FinishEntry(params, seq, j, shared, partial, entry_out);
    __syncthreads();  // Before the next entry takes its place.
  }
}

}  // namespace

absl::Status LaunchCompressorFused(const CompressorArgs& args, const Exec& exec) {
  const DeviceBatch& batch = *args.device_batch;
  if (batch.rows == 0 || batch.num_sequences == 0) return absl::OkStatus();
  const int64_t most_entries = CeilDiv(batch.max_rows_per_sequence, args.ratio);
  Workspace::Scope scope(exec.workspace);
  auto* pooled = scope.Take<float>(batch.num_sequences * most_entries * args.dim);
  const int64_t rows = CompressorRing(args.ratio);
  const int64_t row_floats = 2 * rows * kChannels + kThreads;
  const int64_t floats = row_floats > args.dim ? row_floats : args.dim;
  return Launch("InsertFused",
                {.grid = dim3(static_cast<unsigned>(args.dim / kChannels),
                              static_cast<unsigned>(batch.num_sequences)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(floats) * sizeof(float),
                 .overlaps_predecessor = true},
                exec, InsertFused, ParamsOf(args), pooled, static_cast<int>(most_entries),
                exec.counters);
}

}  // namespace isthmus::kernels
