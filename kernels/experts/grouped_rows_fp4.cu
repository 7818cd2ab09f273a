// SPDX-License-Identifier: Apache-2.0
// Rows as NVFP4 for experts.grouped_w4a4: of x for its routed experts, and of h for their second
// product. Bound by latency in a short batch, by reading the rows once in a long one: the second
// pass over a row finds it in the L1.
#include "kernels/core/launch.cuh"
#include "kernels/experts/experts_grouped.h"
#include "kernels/experts/grouped_fp4_rows.cuh"

namespace isthmus::kernels::grouped {
namespace {

constexpr int kThreads = 128;
constexpr int kRun = kNvfp4Group;

// Sixteen values from element `k` of a row on.
__device__ __forceinline__ void LoadRun(const float* row, int64_t k, float (&x)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(row + k + i);
    x[i] = v.x;
    x[i + 1] = v.y;
    x[i + 2] = v.z;
    x[i + 3] = v.w;
  }
}
__device__ __forceinline__ void LoadRun(const uint16_t* row, int64_t k, float (&x)[kRun]) {
#pragma unroll
  for (int i = 0; i < kRun; i += 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + k + i);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      x[i + 2 * w] = __uint_as_float(words[w] << 16);
      x[i + 2 * w + 1] = __uint_as_float(words[w] & 0xffff0000u);
    }
  }
}

__device__ __forceinline__ uint32_t LargestOf(const float (&x)[kRun]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRun; ++i) {
    const uint32_t bits = MagnitudeBits(x[i]);
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// The largest of all threads' values, by the whole block.
__device__ __forceinline__ uint32_t LargestInBlock(uint32_t value) {
  __shared__ uint32_t of_warps[kThreads / kWarpLanes];
  const uint32_t of_warp = __reduce_max_sync(kFullWarp, value);
  if (threadIdx.x % kWarpLanes == 0) of_warps[threadIdx.x / kWarpLanes] = of_warp;
  __syncthreads();
  uint32_t largest = 0;
#pragma unroll
  for (int w = 0; w < kThreads / kWarpLanes; ++w) {
    largest = of_warps[w] > largest ? of_warps[w] : largest;
  }
  return largest;
}

// Row `row` of `to`, by the whole block: a thread 16 values at a time.
template <typename Value>
__device__ __forceinline__ void QuantiseRow(const Value* from, int64_t row, int64_t inputs,
                                            const Fp4Target& to) {
  const int runs = static_cast<int>(inputs / kRun);
  float x[kRun];
  uint32_t largest = 0;
  for (int run = static_cast<int>(threadIdx.x); run < runs; run += kThreads) {
    LoadRun(from, int64_t{run} * kRun, x);
    const uint32_t of_run = LargestOf(x);
    largest = of_run > largest ? of_run : largest;
  }
  const float row_scale = Nvfp4RowScale(LargestInBlock(largest));
  if (threadIdx.x == 0) to.row_scales[row] = row_scale;
  for (int run = static_cast<int>(threadIdx.x); run < runs; run += kThreads) {
    LoadRun(from, int64_t{run} * kRun, x);
    const uint8_t scale = Nvfp4GroupScale(LargestOf(x), row_scale);
    const float inverse = Nvfp4Inverse(scale, row_scale);
    uint8_t codes[kRun];
#pragma unroll
    for (int i = 0; i < kRun; ++i) codes[i] = Fp4E2m1Code(x[i] * inverse);
    uint32_t words[2];
    PackFp4Run(codes, words);
    uint8_t* at = to.codes + row * (inputs / 2);
    const int t = 2 * (run % 2);
    for (int i = 0; i < 2; ++i) {
      const int place = Fp4WordPlace(run / 8, run / 4 % 2, run / 2 % 2, t + i);
      *reinterpret_cast<uint32_t*>(at + place) = words[i];
    }
    to.scales[row * runs + run] = scale;
  }
}

// Grid: tokens. Block: kThreads. Padding tokens are quantised as well; nobody reads them.
__global__ __launch_bounds__(kThreads) void QuantiseInputRows(
    const float* __restrict__ x,  // [tokens, inputs], rows x_stride apart, aligned to 16 bytes
    int64_t x_stride, int64_t inputs, const __grid_constant__ Fp4Target to) {
#if !ISTHMUS_HAS_SM120A
  __trap();  // No other architecture has products of such rows.
#endif
  LetSuccessorStart();
  WaitForPredecessor();
  QuantiseRow(x + int64_t{blockIdx.x} * x_stride, blockIdx.x, inputs, to);
}

// Grid: most routed rows. Block: kThreads. Rows beyond those of the list are nobody's.
__global__ __launch_bounds__(kThreads) void QuantiseRoutedRows(
    const __grid_constant__ Scratch scratch, int64_t inputs) {
#if !ISTHMUS_HAS_SM120A
  __trap();
#endif
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t row = blockIdx.x;
  if (row >= scratch.list->num_routed_rows) return;
  QuantiseRow(scratch.h + row * inputs, row, inputs, scratch.h_fp4);
}

}  // namespace

absl::Status LaunchQuantiseInputFp4(const Batch& batch, const Scratch& scratch, const float* x,
                                    int64_t x_stride, const Exec& exec) {
  return Launch("QuantiseInputRows",
                {.grid = dim3(static_cast<unsigned>(batch.tokens)),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, QuantiseInputRows, x, x_stride, int64_t{batch.hidden}, scratch.x_fp4);
}

absl::Status LaunchQuantiseHiddenFp4(const Batch& batch, const Scratch& scratch, const Exec& exec) {
  if (batch.k == 0) return absl::OkStatus();
  return Launch("QuantiseRoutedRows",
                {.grid = dim3(static_cast<unsigned>(batch.tokens * batch.k)),
                 .block = dim3(kThreads),
                 .overlaps_predecessor = true},
                exec, QuantiseRoutedRows, scratch, int64_t{batch.intermediate});
}

}  // namespace isthmus::kernels::grouped
