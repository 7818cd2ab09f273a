// SPDX-License-Identifier: Apache-2.0
// How the last split of a row and group of heads adds up what all of them have left in memory, and
// how outputs are written (attention_split_mma.cu).
#pragma once

#include "kernels/attention/attention_mma.cuh"

namespace isthmus::kernels::attention_mma {

// Eight values to 16-aligned memory.
__device__ __forceinline__ void StoreEight(void* to, bool is_bf16, const float (&x)[8]) {
  if (is_bf16) {
    *static_cast<uint4*>(to) = make_uint4(Bf16Pair(x[0], x[1]), Bf16Pair(x[2], x[3]),
                                          Bf16Pair(x[4], x[5]), Bf16Pair(x[6], x[7]));
  } else {
    static_cast<float4*>(to)[0] = make_float4(x[0], x[1], x[2], x[3]);
    static_cast<float4*>(to)[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

__device__ __forceinline__ void* OutputAt(const DeviceAttention& args, int64_t row, int head,
                                          int d) {
  const int64_t at = row * args.out_stride + int64_t{head} * kHeadDim + d;
  return args.is_out_bf16 ? static_cast<void*>(static_cast<uint16_t*>(args.out) + at)
                          : static_cast<void*>(static_cast<float*>(args.out) + at);
}

// out = sum over splits of factor * values; factors: scratch[split][head].x. kStep heads of
// kTogether splits are on their way at once: one after another, their latency would be most of a
// small step.
template <int kMTiles, int kStep, int kTogether>
__device__ __forceinline__ void AddSplits(const DeviceAttention& args, int64_t row, int first_head,
                                          int splits, const float* values, const float2* scratch) {
  constexpr int kHeads = 16 * kMTiles;
  const int d = 4 * static_cast<int>(threadIdx.x);
#pragma unroll 1
  for (int h = 0; h < kHeads; h += kStep) {
    float4 sum[kStep] = {};
#pragma unroll 1
    for (int first = 0; first < splits; first += kTogether) {
      float4 x[kTogether][kStep];
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const bool is_there = first + s < splits && first_head + h + i < args.num_heads;
          const int64_t at = int64_t{(first + s) * kHeads + h + i} * kHeadDim + d;
          x[s][i] = is_there ? __ldcg(reinterpret_cast<const float4*>(values + at))
                             : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
      }
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (first + s >= splits) break;
#pragma unroll
        for (int i = 0; i < kStep; ++i) {
          const float p = scratch[(first + s) * kHeads + h + i].x;
          sum[i] = make_float4(fmaf(p, x[s][i].x, sum[i].x), fmaf(p, x[s][i].y, sum[i].y),
                               fmaf(p, x[s][i].z, sum[i].z), fmaf(p, x[s][i].w, sum[i].w));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      if (first_head + h + i >= args.num_heads) continue;
      void* to = OutputAt(args, row, first_head + h + i, d);
      float4 x = sum[i];
      if (args.is_reference) {
        x = make_float4(RoundBf16(x.x), RoundBf16(x.y), RoundBf16(x.z), RoundBf16(x.w));
      }
      if (args.is_out_bf16) {
        *static_cast<uint2*>(to) = make_uint2(Bf16Pair(x.x, x.y), Bf16Pair(x.z, x.w));
      } else {
        *static_cast<float4*>(to) = x;
      }
    }
  }
}

// Adds up the splits of a row and group of heads, in their order. By the whole block, in the memory
// of `scratch`: [splits][heads].
template <int kMTiles>
__device__ void CombineSplits(const DeviceAttention& args, int64_t row, int first_head, int splits,
                              const float* values, const float2* weights, float2* scratch) {
  constexpr int kHeads = 16 * kMTiles;
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < splits * kHeads; i += kThreads) scratch[i] = __ldcg(weights + i);
  __syncthreads();
  if (thread < kHeads) {
    const int head = first_head + thread;
    const float sink = head < args.num_heads ? args.sink[head] * kLog2E : 0.0f;
    float max = -INFINITY;
    for (int s = 0; s < splits; ++s) max = fmaxf(max, scratch[s * kHeads + thread].x);
    float total = FastExp2(sink - max);
    for (int s = 0; s < splits; ++s) {
      float2& one = scratch[s * kHeads + thread];
      one.x = FastExp2(one.x - max);
      total = fmaf(one.x, one.y, total);
    }
    for (int s = 0; s < splits; ++s) scratch[s * kHeads + thread].x /= total;
  }
  __syncthreads();
  if (splits <= 2) {
    AddSplits<kMTiles, 8, 2>(args, row, first_head, splits, values, scratch);
  } else {
    AddSplits<kMTiles, 4, 4>(args, row, first_head, splits, values, scratch);
  }
}

}  // namespace isthmus::kernels::attention_mma
