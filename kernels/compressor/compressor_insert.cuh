// SPDX-License-Identifier: Apache-2.0
// A decode step's compressor as the work of blocks: a block has a piece of 64 channels of one
// sequence (of both halves of a row, where windows overlap), so that the ring rows it reads are
// those it writes, and a barrier of its own orders the two. The last block of a sequence to come
// finishes the entry: norm, rotation, transform, encoding, insertion. The order of every sum is the
// CPU's.
#pragma once

#include <algorithm>

#include "kernels/compressor/compressor_device.cuh"

namespace isthmus::kernels::insert {

inline constexpr int kChannels = 64;
inline constexpr int kParts = 4;  // Threads of a channel; rows are dealt to them in turn.
inline constexpr int kThreads = kChannels * kParts;

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
                                         int piece, int64_t j, int64_t begin, int count,
                                         const PooledRows& rows) {
  const int c = static_cast<int>(threadIdx.x) % kChannels;
  const int part = static_cast<int>(threadIdx.x) / kChannels;
  const int64_t d = int64_t{piece} * kChannels + c;
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
__device__ __forceinline__ void PoolRows(const CompressorParams& params, int piece, int count,
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
    z[piece * kChannels + c] = params.is_reference ? RoundBf16(pooled) : pooled;
  }
  __syncthreads();  // Before the rows of the next entry.
}

// Row r, at position p, of the block's channels into the ring, when a later entry reads it.
__device__ __forceinline__ void KeepChannels(const CompressorParams& params,
                                             const DeviceSequence& seq, int piece, int64_t r,
                                             int64_t p) {
  const int c = static_cast<int>(threadIdx.x) % kChannels;
  const int half = static_cast<int>(threadIdx.x) / kChannels;
  if (half >= params.width / params.dim) return;
  const int first = half * params.dim + piece * kChannels + c;
  KeepRow(params, seq, r, p, first, params.width);
}

// By a whole block of kThreads, after WaitForPredecessor: piece `piece` of the dim / kChannels of
// sequence s. Shared memory: SharedBytes, dynamic. pooled: [sequences][most_entries][dim];
// counters: [sequences], zeros, and zeros again afterwards.
__device__ __forceinline__ void InsertPiece(const CompressorParams& params, int piece, int64_t s,
                                            float* pooled, int most_entries, unsigned* counters) {
  __shared__ float partial[16];
  __shared__ unsigned turn;
  auto* shared = reinterpret_cast<float*>(DynamicShared());
  const DeviceSequence& seq = params.batch.sequences[s];
  const int64_t first_entry = seq.start_position / params.ratio;
  const int64_t end_entry = (seq.start_position + seq.num_rows) / params.ratio;
  float* z = pooled + s * most_entries * params.dim;
  for (int64_t j = first_entry; j < end_entry; ++j) {
    const int64_t begin = FirstPooledPosition(j, params.ratio);
    const int count = static_cast<int>(params.ratio * (j + 1) - begin);
    const PooledRows rows = RowsIn(shared, count);
    LoadRows(params, seq, piece, j, begin, count, rows);
    __syncthreads();
    PoolRows(params, piece, count, rows, z + (j - first_entry) * params.dim);
  }
  for (int64_t i = 0; i < seq.num_rows; ++i) {
    KeepChannels(params, seq, piece, seq.first_row + i, seq.start_position + i);
  }
  if (first_entry == end_entry) return;  // In all blocks of the sequence.
  const auto pieces = static_cast<unsigned>(params.dim / kChannels);
  if (TakeTurn(counters + s, pieces, &turn) != pieces - 1) return;
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

// ---- The host's part

// The rows of an entry or, for the last block, an entry.
inline size_t SharedBytes(const CompressorArgs& args) {
  const int64_t rows = 2 * CompressorRing(args.ratio) * kChannels + kThreads;
  return static_cast<size_t>(std::max<int64_t>(rows, args.dim)) * sizeof(float);
}
inline int64_t MostEntries(const CompressorArgs& args) {
  return CeilDiv(args.device_batch->max_rows_per_sequence, args.ratio);
}
// Floats of `pooled`.
inline int64_t PooledFloats(const CompressorArgs& args) {
  return args.device_batch->num_sequences * MostEntries(args) * args.dim;
}

}  // namespace isthmus::kernels::insert
