// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of the compressor share: their arguments, where a row lies, and how an
// entry is stored. Each step has the bits of the CPU path.
#pragma once

#include <cmath>

#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"

namespace isthmus::kernels {

// The arguments as kernels take them, by value; all pointers are device memory.
struct CompressorParams {
  const float* u;            // [rows, width], rows u_stride apart
  const float* g;            // [rows, width], rows g_stride apart; without ape
  const float* ape;          // [ratio, width], rows ape_stride apart
  const float* norm_weight;  // [dim]
  const float* frequency;    // [rope_dim / 2]
  int64_t u_stride;
  int64_t g_stride;
  int64_t ape_stride;
  int dim;
  int rope_dim;
  int ratio;
  int width;
  float epsilon;
  bool is_index_key;
  bool is_reference;
  DeviceBatch batch;
  EntryPlane entry_plane;
  int entry_kind;
  EntryPlane state_plane;
  float* entries;  // [new entries][dim], or null
};

CompressorParams ParamsOf(const CompressorArgs& args);

// Channel `c` of the row at position `p`: from the ring when it is older than the chunk.
__device__ __forceinline__ PoolRow RowValue(const CompressorParams& params,
                                            const DeviceSequence& seq, int64_t p) {
  const int64_t slot = p % CompressorRing(params.ratio);
  const std::byte* data = EntryData(params.state_plane, seq.state, slot);
  const auto* row = reinterpret_cast<const float*>(data);
  if (p < seq.start_position) return {row, row + params.width};
  const int64_t r = seq.first_row + p - seq.start_position;
  return {params.u + r * params.u_stride, params.g + r * params.g_stride};
}
// The gate of channel `c` of a row of this chunk.
__device__ __forceinline__ float GateOf(const CompressorParams& params, const float* g, int64_t p,
                                        int64_t c) {
  return g[c] + params.ape[p % params.ratio * params.ape_stride + c];
}

// Channel d of entry j: the softmax over its rows of the gates, times the values. Rows in ascending
// order of position.
__device__ __forceinline__ float PoolChannel(const CompressorParams& params,
                                             const DeviceSequence& seq, int64_t j, int64_t d) {
  const int64_t begin = FirstPooledPosition(j, params.ratio);
  const int64_t current = params.ratio * j;
  const int64_t end = current + params.ratio;
  const auto channel = [&](int64_t p) {
    return params.ratio == 4 && p >= current ? params.dim + d : d;
  };
  const auto gate = [&](const PoolRow& row, int64_t p) {
    const int64_t c = channel(p);
    return p < seq.start_position ? row.g[c] : GateOf(params, row.g, p, c);
  };
  float largest = gate(RowValue(params, seq, begin), begin);
  for (int64_t p = begin + 1; p < end; ++p) {
    largest = fmaxf(gate(RowValue(params, seq, p), p), largest);
  }
  float numerator = 0.0f;
  float denominator = 0.0f;
  for (int64_t p = begin; p < end; ++p) {
    const PoolRow row = RowValue(params, seq, p);
    const float weight = Exp(gate(row, p) - largest);
    numerator = fmaf(weight, row.u[channel(p)], numerator);
    denominator = denominator + weight;
  }
  return numerator / denominator;
}

// Below, z [dim] is shared memory that the whole block works on, barriers inside; `partial` [16] is
// shared, too. On return all threads see the result.

// round(z * scale * weight), the sum of squares by the CPU's 16 partial sums and tree.
__device__ __forceinline__ void NormEntry(const CompressorParams& params, float* z,
                                          float* partial) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < 16) {
    float sum = 0.0f;
    for (int d = thread; d < params.dim; d += 16) sum = fmaf(z[d], z[d], sum);
    partial[thread] = sum;
  }
  __syncthreads();
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) sums[i] = partial[i] + partial[i + 8];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = sums[i] + sums[i + 4];
  const float total = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  const float scale = 1.0f / sqrtf(total / static_cast<float>(params.dim) + params.epsilon);
  for (int d = thread; d < params.dim; d += static_cast<int>(blockDim.x)) {
    const float value = z[d] * scale * params.norm_weight[d];
    z[d] = params.is_reference ? RoundBf16(value) : value;
  }
  __syncthreads();
}

__device__ __forceinline__ void RotateEntry(const CompressorParams& params, int64_t position,
                                            float* z) {
  float* x = z + params.dim - params.rope_dim;
  for (int i = static_cast<int>(threadIdx.x); i < params.rope_dim / 2;
       i += static_cast<int>(blockDim.x)) {
    float sin = 0.0f;
    float cos = 0.0f;
    SinCos(static_cast<float>(position) * params.frequency[i], &sin, &cos);
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    const float real = a * cos - b * sin;
    const float imaginary = a * sin + b * cos;
    x[2 * i] = params.is_reference ? RoundBf16(real) : real;
    x[2 * i + 1] = params.is_reference ? RoundBf16(imaginary) : imaginary;
  }
  __syncthreads();
}

// round(Hadamard(z) / sqrt(dim))
__device__ __forceinline__ void TransformEntry(const CompressorParams& params, float* z) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int stride = 1; stride < params.dim; stride *= 2) {
    for (int i = thread; i < params.dim / 2; i += threads) {
      const int at = i / stride * 2 * stride + i % stride;
      const float a = z[at];
      const float b = z[at + stride];
      z[at] = a + b;
      z[at + stride] = a - b;
    }
    __syncthreads();
  }
  const float factor = 1.0f / sqrtf(static_cast<float>(params.dim));
  for (int d = thread; d < params.dim; d += threads) z[d] = RoundBf16(z[d] * factor);
  __syncthreads();
}

// The exponent of the scale of kBlock values at x; all lanes of a warp call it and have it.
template <int kBlock>
__device__ __forceinline__ int ScaleExponentOf(const float* x) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < kBlock; i += kWarpLanes) largest = fmaxf(largest, fabsf(x[i + lane]));
  largest = WarpMax(largest);
  return kBlock == kIndexKeyBlock ? Fp4ScaleExponent(largest) : Fp8ScaleExponent(largest);
}

// The entry as fp8 with one scale, or as the bf16 that it is; z becomes what a reader decodes. The
// scale is found by each warp for itself: a key is short.
__device__ __forceinline__ void StoreWideIndexKey(const CompressorParams& params, std::byte* data,
                                                  std::byte* scale, float* z) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  if (params.entry_plane.format == EntryFormat::kKeyBf16) {
    for (int d = thread; d < params.dim; d += threads) {
      reinterpret_cast<uint16_t*>(data)[d] = Bf16Bits(z[d]);
    }
    __syncthreads();
    return;
  }
  float largest = 0.0f;
  for (int d = thread % kWarpLanes; d < params.dim; d += kWarpLanes) {
    largest = fmaxf(largest, fabsf(z[d]));
  }
  const int exponent = Fp8ScaleExponent(WarpMax(largest));
  __syncthreads();  // All have read z.
  if (thread == 0) *reinterpret_cast<float*>(scale) = PowerOfTwo(exponent);
  const float inverse = 1.0f / PowerOfTwo(exponent);
  for (int d = thread; d < params.dim; d += threads) {
    const uint8_t code = Fp8E4m3Code(z[d] * inverse);
    data[d] = static_cast<std::byte>(code);
    z[d] = Fp8E4m3Value(code) * PowerOfTwo(exponent);
  }
  __syncthreads();
}

// The entry as fp4 pairs; z becomes what a reader decodes. A warp a block of 32.
__device__ __forceinline__ void StoreIndexKey(const CompressorParams& params, std::byte* data,
                                              std::byte* scale, float* z) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warps = static_cast<int>(blockDim.x) / kWarpLanes;
  for (int b = static_cast<int>(threadIdx.x) / kWarpLanes; b < params.dim / kIndexKeyBlock;
       b += warps) {
    float* x = z + b * kIndexKeyBlock;
    const int exponent = ScaleExponentOf<kIndexKeyBlock>(x);
    if (lane == 0) scale[b] = static_cast<std::byte>(exponent + 127);
    const uint8_t code = Fp4E2m1Code(x[lane] * (1.0f / PowerOfTwo(exponent)));
    const unsigned next = __shfl_down_sync(kFullWarp, unsigned{code}, 1);
    if (lane % 2 == 0) {
      data[(b * kIndexKeyBlock + lane) / 2] = static_cast<std::byte>(code | next << 4);
    }
    x[lane] = Fp4E2m1Value(code) * PowerOfTwo(exponent);
  }
  __syncthreads();
}

// The entry as fp8 and bf16; z becomes what a reader decodes. A warp a block of 64.
__device__ __forceinline__ void StoreKvEntry(const CompressorParams& params, std::byte* data,
                                             std::byte* scale, float* z) {
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpLanes;
  const int threads = static_cast<int>(blockDim.x);
  const int nope = params.dim - params.rope_dim;
  const int blocks = nope / kKvNopeBlock;
  for (int b = thread / kWarpLanes; b < blocks; b += threads / kWarpLanes) {
    const int exponent = ScaleExponentOf<kKvNopeBlock>(z + b * kKvNopeBlock);
    if (lane == 0) scale[b] = static_cast<std::byte>(exponent + 127);
    const float inverse = 1.0f / PowerOfTwo(exponent);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = b * kKvNopeBlock + half * kWarpLanes + lane;
      const uint8_t code = Fp8E4m3Code(z[d] * inverse);
      data[d] = static_cast<std::byte>(code);
      z[d] = Fp8E4m3Value(code) * PowerOfTwo(exponent);
    }
  }
  if (thread >= blocks && thread < 8) scale[thread] = std::byte{0};
  for (int i = thread; i < params.rope_dim; i += threads) {
    const uint16_t bits = Bf16Bits(z[nope + i]);
    reinterpret_cast<uint16_t*>(data + nope)[i] = bits;
    z[nope + i] = Bf16Value(bits);
  }
  __syncthreads();
}

// From the pooled and rounded z to the page of entry j and to `entry_out` ([dim], or null).
__device__ __forceinline__ void FinishEntry(const CompressorParams& params,
                                            const DeviceSequence& seq, int64_t j, float* z,
                                            float* partial, float* entry_out) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  NormEntry(params, z, partial);
  RotateEntry(params, params.ratio * j, z);
  std::byte* page = PageOf(seq, params.entry_kind, params.entry_plane, j);
  const int64_t place = j % params.entry_plane.entries;
  std::byte* data = EntryData(params.entry_plane, page, place);
  std::byte* scale = EntryScale(params.entry_plane, page, place);
  if (!params.is_reference) {
    auto* row = reinterpret_cast<float*>(data);
    for (int d = thread; d < params.dim; d += threads) row[d] = z[d];
  } else if (params.is_index_key) {
    TransformEntry(params, z);
    if (params.entry_plane.format == EntryFormat::kKeyFp4) {
      StoreIndexKey(params, data, scale, z);
    } else {
      StoreWideIndexKey(params, data, scale, z);
    }
  } else {
    StoreKvEntry(params, data, scale, z);
  }
  if (entry_out != nullptr) {
    for (int d = thread; d < params.dim; d += threads) entry_out[d] = z[d];
  }
}

// Where entry j of sequence `s` stands among the new entries of all sequences.
__device__ __forceinline__ int64_t EntryNumber(const CompressorParams& params, int64_t s,
                                               int64_t j) {
  int64_t before = 0;
  for (int64_t i = 0; i < s; ++i) {
    const DeviceSequence& other = params.batch.sequences[i];
    before += NewEntries(other.start_position, other.start_position + other.num_rows, params.ratio);
  }
  return before + j - params.batch.sequences[s].start_position / params.ratio;
}

// Writes row r of the chunk into the ring when a later entry reads it. Channels from `first` on,
// `step` apart.
__device__ __forceinline__ void KeepRow(const CompressorParams& params, const DeviceSequence& seq,
                                        int64_t r, int64_t p, int first, int step) {
  if (p < FirstKeptPosition(seq.start_position + seq.num_rows, params.ratio)) return;
  const int64_t slot = p % CompressorRing(params.ratio);
  auto* row = reinterpret_cast<float*>(EntryData(params.state_plane, seq.state, slot));
  const float* u = params.u + r * params.u_stride;
  const float* g = params.g + r * params.g_stride;
  for (int c = first; c < params.width; c += step) {
    row[c] = u[c];
    row[params.width + c] = GateOf(params, g, p, c);
  }
}

}  // namespace isthmus::kernels
