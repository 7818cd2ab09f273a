// SPDX-License-Identifier: Apache-2.0
// Views of tensors that somebody else owns. Data where a class would add nothing.
#pragma once

#include <cstdint>

namespace isthmus::kernels {

enum class DType : uint8_t { kF32, kF16, kBf16, kFp8E4m3, kUe8m0, kFp4E2m1, kI8, kU8, kI32, kI64 };

// A matrix with contiguous rows that may lie apart.
struct MatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // In elements.

  // Row `r` of an f32 matrix.
  float* f32(int64_t r) const { return static_cast<float*>(data) + r * row_stride; }

  // Columns [first, first + count) of an f32 matrix, sharing its rows.
  MatrixView Columns(int64_t first, int64_t count) const {
    return {static_cast<float*>(data) + first, dtype, rows, count, row_stride};
  }
  // Rows [first, first + count) of an f32 matrix.
  MatrixView Rows(int64_t first, int64_t count) const {
    return {static_cast<float*>(data) + first * row_stride, dtype, count, cols, row_stride};
  }
};

struct VectorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t size = 0;

  const float* f32() const { return static_cast<const float*>(data); }
};

inline MatrixView F32Matrix(float* data, int64_t rows, int64_t cols) {
  return {data, DType::kF32, rows, cols, cols};
}
inline VectorView F32Vector(const float* data, int64_t size) { return {data, DType::kF32, size}; }

}  // namespace isthmus::kernels
