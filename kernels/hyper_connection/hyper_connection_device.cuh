// SPDX-License-Identifier: Apache-2.0
// What the CUDA kernels of the hyper-connections share: matrices of f32 or bf16, and the split of
// one token's mixes by a warp, with the bits of SplitMixes.
#pragma once

#include <cmath>

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/core/tensor.h"
#include "kernels/hyper_connection/hyper_connection.h"

namespace isthmus::kernels {

// Element (r, c) of a matrix of either type. Plain: one branch an element.
__device__ __forceinline__ float LoadElement(const MatrixView& m, int64_t r, int64_t c) {
  const int64_t at = r * m.row_stride + c;
  if (m.dtype == DType::kBf16) return Bf16Value(static_cast<const uint16_t*>(m.data)[at]);
  return static_cast<const float*>(m.data)[at];
}
__device__ __forceinline__ void StoreElement(const MatrixView& m, int64_t r, int64_t c, float x) {
  const int64_t at = r * m.row_stride + c;
  if (m.dtype == DType::kBf16) {
    static_cast<uint16_t*>(m.data)[at] = Bf16Bits(x);
  } else {
    static_cast<float*>(m.data)[at] = x;
  }
}

// Row r of an f32 matrix.
__device__ __forceinline__ float* FloatRow(const MatrixView& m, int64_t r) {
  return static_cast<float*>(m.data) + r * m.row_stride;
}

// Of a 4 x 4 matrix with element i in lane i (and again in lane i + 16): the sum of four elements,
// `step` lanes apart from `first` on, from the left.
__device__ __forceinline__ float SumOfLine(float c, int first, int step) {
  float sum = __shfl_sync(kFullWarp, c, first);
  for (int i = 1; i < kNumStreams; ++i) sum += __shfl_sync(kFullWarp, c, first + i * step);
  return sum;
}

// Softmax of the rows and Sinkhorn's passes (specification 2.3): the logit of element i in lanes i
// and i + 16, the result likewise. All 32 lanes call it.
__device__ __forceinline__ float BalanceByWarp(float logit, int iterations, float epsilon) {
  const int i = static_cast<int>(threadIdx.x) % (kNumStreams * kNumStreams);
  const int row = i / kNumStreams * kNumStreams;
  const int column = i % kNumStreams;
  float largest = logit;
  for (int lanes = 1; lanes < kNumStreams; lanes *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, lanes));
  }
  float c = Exp(logit - largest);
  c = c / SumOfLine(c, row, 1) + epsilon;
  c = c / (SumOfLine(c, column, kNumStreams) + epsilon);
  for (int pass = 1; pass < iterations; ++pass) {
    c = c / (SumOfLine(c, row, 1) + epsilon);
    c = c / (SumOfLine(c, column, kNumStreams) + epsilon);
  }
  return c;
}

}  // namespace isthmus::kernels
