// SPDX-License-Identifier: Apache-2.0
// Norm, rotation and round trip of a head by a warp. The operations and their order are those of
// the trusted path, so the same bits.
//
// A lane holds n = head_dim / 32 elements: lane l the elements 16 (n (l / 16) + j) + l % 16, so
// that lanes i and i + 16 together have the chain of partial sum i of the CPU's sum of squares, the
// first half of it and the second; and four neighbours j of a half warp are a block of 64.
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/fused/attention_inputs/head_norm_rope.h"

namespace isthmus::kernels::heads {

inline constexpr int kWarps = 8;  // Heads of a block.
inline constexpr int kMaxEach = 16;
inline constexpr int kMaxPairs = 64;

struct HeadParams {
  float* q;                  // [tokens, heads, head_dim]
  float* kv;                 // [tokens, head_dim], rows kv_stride apart
  const float* kv_weight;    // [head_dim]
  const int64_t* positions;  // [tokens]
  const float* frequency;    // [pairs]
  int64_t kv_stride;
  int heads, head_dim, pairs;
  float epsilon;
  bool is_reference;
};

// 1 / sqrt(mean(x^2) + epsilon), in all lanes.
__device__ inline float NormScale(const float (&x)[kMaxEach], int n, int lane, int head_dim,
                                  float epsilon) {
  float sum = 0.0f;
  for (int half = 0; half < 2; ++half) {
    if (lane / 16 == half) {
#pragma unroll
      for (int j = 0; j < kMaxEach; ++j) {
        if (j < n) sum = fmaf(x[j], x[j], sum);
      }
    }
    sum = __shfl_sync(kFullWarp, sum, lane % 16 + 16 * half);
  }
  for (int lanes = 8; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  return 1.0f / std::sqrt(sum / static_cast<float>(head_dim) + epsilon);
}

// The fp8 round trip of the blocks of 64 that end at or before element `end`.
__device__ inline void RoundTripBlocks(float (&x)[kMaxEach], int n, int lane, int end) {
#pragma unroll
  for (int first = 0; first < kMaxEach; first += 4) {
    float amax = 0.0f;
#pragma unroll
    for (int j = first; j < first + 4; ++j) amax = fmaxf(amax, fabsf(x[j]));
    for (int lanes = 8; lanes > 0; lanes /= 2) {
      amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, lanes));
    }
    if (first >= n || 16 * (n * (lane / 16) + first) >= end) continue;
    const float scale = PowerOfTwo(Fp8ScaleExponent(amax));
    const float inverse = 1.0f / scale;
#pragma unroll
    for (int j = first; j < first + 4; ++j)
      x[j] = Fp8E4m3Value(Fp8E4m3Code(x[j] * inverse)) * scale;
  }
}

// Heads [first_head, first_head + kWarps) of token t, as far as there are any; head `heads` is kv.
// By a whole block of kWarps warps, after WaitForPredecessor. Requires head_dim % 128 == 0 and
// head_dim <= 512.
__device__ __forceinline__ void NormRopeHeads(const HeadParams& args, int64_t t, int first_head) {
  __shared__ float cosine[kMaxPairs];
  __shared__ float sine[kMaxPairs];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < args.pairs) {
    SinCos(static_cast<float>(args.positions[t]) * args.frequency[thread], &sine[thread],
           &cosine[thread]);
  }
  __syncthreads();
  const int head = first_head + thread / kWarpLanes;
  if (head > args.heads) return;  // Whole warps leave together.
  const int lane = thread % kWarpLanes;
  const int n = args.head_dim / kWarpLanes;
  const bool is_kv = head == args.heads;
  float* row =
      is_kv ? args.kv + t * args.kv_stride : args.q + (t * args.heads + head) * args.head_dim;
  const int begin = 16 * n * (lane / 16) + lane % 16;  // Of the lane's elements, 16 apart.

  float x[kMaxEach];
#pragma unroll
  for (int j = 0; j < kMaxEach; ++j) x[j] = j < n ? row[begin + 16 * j] : 0.0f;
  const float scale = NormScale(x, n, lane, args.head_dim, args.epsilon);
  const int rotated = args.head_dim - 2 * args.pairs;
#pragma unroll
  for (int j = 0; j < kMaxEach; ++j) {
    if (j >= n) break;
    const int k = begin + 16 * j;
    float value = x[j] * scale;
    if (is_kv) value *= args.kv_weight[k];
    if (args.is_reference) value = RoundBf16(value);
    const float other = __shfl_xor_sync(kFullWarp, value, 1);
    if (k >= rotated) {
      const int pair = (k - rotated) / 2;
      const float s = sine[pair];
      value = value * cosine[pair] + other * (k % 2 == 0 ? -s : s);
      if (args.is_reference) value = RoundBf16(value);
    }
    x[j] = value;
  }
  if (is_kv && args.is_reference) RoundTripBlocks(x, n, lane, rotated);
#pragma unroll
  for (int j = 0; j < kMaxEach; ++j) {
    if (j < n) row[begin + 16 * j] = x[j];
  }
}

// ---- The host's part

inline HeadParams ParamsOf(const HeadNormRopeArgs& args) {
  return {.q = args.q.f32(0),
          .kv = args.kv.f32(0),
          .kv_weight = args.kv_weight.f32(),
          .positions = args.positions.data(),
          .frequency = args.frequency.data(),
          .kv_stride = args.kv.row_stride,
          .heads = static_cast<int>(args.q.cols / args.head_dim),
          .head_dim = static_cast<int>(args.head_dim),
          .pairs = static_cast<int>(args.frequency.size()),
          .epsilon = args.epsilon,
          .is_reference = args.arithmetic == Arithmetic::kReference};
}

}  // namespace isthmus::kernels::heads
