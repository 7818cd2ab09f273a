// SPDX-License-Identifier: Apache-2.0
// How what the splits of a row have left in memory becomes its output, and how outputs are written
// (attention_split_mma.cu).
#pragma once

#include "kernels/attention/attention_keys.cuh"

namespace isthmus::kernels::attention_mma {

__device__ __forceinline__ void StoreFour(float* to, const float (&x)[4]) {
  *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// Channels from `d` of a head's output. Reference arithmetic, which is all that comes here, has
// them on the bf16 grid.
__device__ __forceinline__ void StoreOutput(const DeviceAttention& args, int64_t row, int head,
                                            int d, const float (&x)[4]) {
  const int64_t at = row * args.out_stride + int64_t{head} * kHeadDim + d;
  const uint2 pairs = make_uint2(Bf16Pair(x[0], x[1]), Bf16Pair(x[2], x[3]));
  if (args.is_out_bf16) {
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.out) + at) = pairs;
  } else {
    const float rounded[4] = {LowBf16(pairs.x), HighBf16(pairs.x), LowBf16(pairs.y),
                              HighBf16(pairs.y)};
    StoreFour(static_cast<float*>(args.out) + at, rounded);
  }
}

// The lane's split's factor of its values: lane s has split s, the lanes behind the last one 0.
__device__ __forceinline__ float SplitFactor(float2 weight, float sink) {
  const float max = WarpMax(weight.x);
  const float p = FastExp2(weight.x - max);
  const float total = WarpSum(p * weight.y) + FastExp2(sink - max);
  return p / total;
}

constexpr int kCombineThreads = kHeadDim / 4;

// out = sum over splits, in their order, of factor * values. A thread has four channels; kTogether
// splits are on their way at once. Grid: (rows, heads). Block: kCombineThreads. Shared memory:
// none.
template <int kTogether>
__global__ __launch_bounds__(kCombineThreads) void CombineSplits(DeviceAttention args,
                                                                 SplitPlan plan) {
  const int64_t heads = args.num_heads;
  const int64_t row = blockIdx.x;
  const auto head = static_cast<int>(blockIdx.y);
  const RowKeys keys = KeysOf(args, plan, row, 0);
  const float sink = args.sink[head] * kLog2E;
  WaitForPredecessor();
  LetSuccessorStart();
  if (keys.row_tiles == 0) return;
  const int splits = (keys.row_tiles + keys.tiles_per_split - 1) / keys.tiles_per_split;
  const int lane = FreshLane();
  const int64_t first = row * plan.max_splits * heads + head;
  float2 weight = make_float2(-INFINITY, 0.0f);
  if (lane < splits) weight = __ldcg(plan.weights + first + lane * heads);
  const int d = 4 * static_cast<int>(threadIdx.x);
  const float* values = plan.values + first * kHeadDim + d;
  float factor = 0.0f;
  float4 sum = {};
  for (int s = 0; s < splits; s += kTogether) {
    float4 x[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      x[i] = s + i < splits
                 ? __ldcg(reinterpret_cast<const float4*>(values + (s + i) * heads * kHeadDim))
                 : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (s == 0) factor = SplitFactor(weight, sink);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float p = __shfl_sync(kFullWarp, factor, s + i);
      sum = make_float4(fmaf(p, x[i].x, sum.x), fmaf(p, x[i].y, sum.y), fmaf(p, x[i].z, sum.z),
                        fmaf(p, x[i].w, sum.w));
    }
  }
  const float out[4] = {sum.x, sum.y, sum.z, sum.w};
  StoreOutput(args, row, head, d, out);
}

}  // namespace isthmus::kernels::attention_mma
