// SPDX-License-Identifier: Apache-2.0
// elementwise on any GPU, trusted. Bound by launches in decode and by memory in prefill: every
// element is read once and written once, so the floor is the bytes of the matrices.
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/elementwise/elementwise_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kElementsPerBlock = 4 * kThreads;

// Columns of a row that a block of grid.y takes.
__device__ __forceinline__ int64_t FirstColumn() {
  return int64_t{blockIdx.y} * kElementsPerBlock + threadIdx.x;
}
__device__ __forceinline__ int64_t EndColumn(int64_t cols) {
  const int64_t end = (int64_t{blockIdx.y} + 1) * kElementsPerBlock;
  return end < cols ? end : cols;
}

// Grid: [tokens, hidden / kElementsPerBlock]. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void EmbedTokensKernel(
    const int32_t* __restrict__ tokens,  // [tokens]
    const uint16_t* __restrict__ table,  // [vocab, hidden]
    float* __restrict__ streams,         // [tokens, streams * hidden], rows `stride` apart
    int64_t hidden, int64_t cols, int64_t stride) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t t = blockIdx.x;
  const int32_t token = tokens[t];
  for (int64_t d = FirstColumn(); d < EndColumn(hidden); d += kThreads) {
    const float value = token < 0 ? 0.0f : Bf16Value(table[int64_t{token} * hidden + d]);
    for (int64_t at = d; at < cols; at += hidden) streams[t * stride + at] = value;
  }
}

// Grid: [out rows, cols / kElementsPerBlock]. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void GatherRowsKernel(
    const float* __restrict__ x,       // [any, cols], rows x_stride apart
    const int32_t* __restrict__ rows,  // [out rows]
    float* __restrict__ out,           // [out rows, cols], rows out_stride apart
    int64_t cols, int64_t x_stride, int64_t out_stride) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t r = blockIdx.x;
  const int32_t from = rows[r];
  for (int64_t d = FirstColumn(); d < EndColumn(cols); d += kThreads) {
    out[r * out_stride + d] = from < 0 ? 0.0f : x[int64_t{from} * x_stride + d];
  }
}

// One warp per block of 64 values, two per lane. Grid: [tokens]. Block: [32, blocks of 64].
__global__ void RoundTripKvKernel(float* x,  // [tokens, head_dim], rows `stride` apart
                                  int64_t stride) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t lane = threadIdx.x;
  float* block = x + int64_t{blockIdx.x} * stride + int64_t{threadIdx.y} * kKvNopeBlock;
  const float low = block[lane];
  const float high = block[lane + kWarpLanes];
  const int exponent = Fp8ScaleExponent(WarpMax(fmaxf(fabsf(low), fabsf(high))));
  const float scale = PowerOfTwo(exponent);
  const float inverse = 1.0f / scale;
  block[lane] = Fp8E4m3Value(Fp8E4m3Code(low * inverse)) * scale;
  block[lane + kWarpLanes] = Fp8E4m3Value(Fp8E4m3Code(high * inverse)) * scale;
}

// Grid: [tokens, cols / kElementsPerBlock]. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void ScaleRowsKernel(
    float* x,  // [tokens, cols], rows `stride` apart
    int64_t cols, int64_t stride, float scale, bool rounds) {
  LetSuccessorStart();
  WaitForPredecessor();
  const int64_t t = blockIdx.x;
  for (int64_t d = FirstColumn(); d < EndColumn(cols); d += kThreads) {
    const float value = x[t * stride + d] * scale;
    x[t * stride + d] = rounds ? RoundBf16(value) : value;
  }
}

LaunchShape ShapeFor(int64_t rows, int64_t cols) {
  return {.grid = dim3(static_cast<unsigned>(rows), CeilDiv(cols, kElementsPerBlock)),
          .block = dim3(kThreads),
          .overlaps_predecessor = true};
}

}  // namespace

absl::Status LaunchEmbedTokensCuda(const EmbedTokensArgs& args, const Exec& exec) {
  const MatrixView& out = args.streams;
  if (out.rows == 0) return absl::OkStatus();
  return Launch("EmbedTokensKernel", ShapeFor(out.rows, args.table.cols), exec, EmbedTokensKernel,
                args.tokens, static_cast<const uint16_t*>(args.table.elements), out.f32(0),
                args.table.cols, out.cols, out.row_stride);
}

absl::Status LaunchGatherRowsCuda(const GatherRowsArgs& args, const Exec& exec) {
  const MatrixView& out = args.out;
  if (out.rows == 0) return absl::OkStatus();
  return Launch("GatherRowsKernel", ShapeFor(out.rows, out.cols), exec, GatherRowsKernel,
                static_cast<const float*>(args.x.data), args.rows, out.f32(0), out.cols,
                args.x.row_stride, out.row_stride);
}

absl::Status LaunchRoundTripKvCuda(const RoundTripKvArgs& args, const Exec& exec) {
  const int64_t blocks = (args.x.cols - args.rope_dim) / kKvNopeBlock;
  if (args.x.rows * blocks == 0) return absl::OkStatus();
  return Launch("RoundTripKvKernel",
                {.grid = dim3(static_cast<unsigned>(args.x.rows)),
                 .block = dim3(kWarpLanes, static_cast<unsigned>(blocks)),
                 .overlaps_predecessor = true},
                exec, RoundTripKvKernel, args.x.f32(0), args.x.row_stride);
}

absl::Status LaunchScaleRowsCuda(const ScaleRowsArgs& args, const Exec& exec) {
  const MatrixView& x = args.x;
  if (x.rows == 0) return absl::OkStatus();
  return Launch("ScaleRowsKernel", ShapeFor(x.rows, x.cols), exec, ScaleRowsKernel, x.f32(0),
                x.cols, x.row_stride, args.scale, args.arithmetic == Arithmetic::kReference);
}

}  // namespace isthmus::kernels
