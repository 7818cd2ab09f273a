// SPDX-License-Identifier: Apache-2.0
// Shapes and operands for the tests of linear's CUDA variants; no part of the product.
#pragma once

#include <cmath>
#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels::testing {

struct ShapeCase {
  WeightFormat format;
  int64_t tokens, rows, cols;  // Tokens, N, K.
  int64_t first_row = 0;
  int64_t first_col = 0;
  bool quantise = false;
  bool is_mxfp4_cast = false;
  bool is_rounded = true;  // x on the bf16 grid.
};
inline std::ostream& operator<<(std::ostream& out, const ShapeCase& c) {
  return out << "format " << static_cast<int>(c.format) << ", " << c.tokens << " tokens, N "
             << c.rows << " from " << c.first_row << ", K " << c.cols << " from " << c.first_col
             << (c.quantise ? ", quantised" : "");
}

inline constexpr ShapeCase kSmallLinears[] = {
    {.format = WeightFormat::kF32, .tokens = 1, .rows = 24, .cols = 256},
    {.format = WeightFormat::kF32, .tokens = 9, .rows = 17, .cols = 133},
    {.format = WeightFormat::kBf16, .tokens = 1, .rows = 64, .cols = 256},
    {.format = WeightFormat::kBf16, .tokens = 3, .rows = 33, .cols = 200},
    {.format = WeightFormat::kBf16, .tokens = 19, .rows = 48, .cols = 512},
    {.format = WeightFormat::kBf16, .tokens = 2, .rows = 300, .cols = 192, .is_rounded = false},
    {.format = WeightFormat::kBf16, .tokens = 40, .rows = 144, .cols = 256, .is_rounded = false},
    {.format = WeightFormat::kBf16, .tokens = 70, .rows = 32, .cols = 256},
    {.format = WeightFormat::kBf16, .tokens = 130, .rows = 144, .cols = 200, .is_rounded = false},
    {.format = WeightFormat::kFp8Block128, .tokens = 1, .rows = 64, .cols = 512, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 2, .rows = 16, .cols = 128, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 1, .rows = 1, .cols = 1, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 9, .rows = 150, .cols = 160, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 17, .rows = 40, .cols = 384, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 33, .rows = 80, .cols = 256, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 64, .rows = 32, .cols = 256, .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 130,
     .rows = 144,
     .cols = 256,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 70, .rows = 20, .cols = 200, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 4, .rows = 64, .cols = 256},
    {.format = WeightFormat::kFp8Block128, .tokens = 13, .rows = 40, .cols = 300},
    {.format = WeightFormat::kFp8Block128, .tokens = 35, .rows = 140, .cols = 200},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 7,
     .rows = 40,
     .cols = 260,
     .is_rounded = false},
    {.format = WeightFormat::kFp8Block128, .tokens = 66, .rows = 40, .cols = 260},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 130,
     .rows = 40,
     .cols = 200,
     .is_rounded = false},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 4,
     .rows = 64,
     .cols = 256,
     .first_row = 64,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 5,
     .rows = 48,
     .cols = 224,
     .first_row = 112,
     .first_col = 32,
     .quantise = true},
    {.format = WeightFormat::kMxfp4, .tokens = 2, .rows = 40, .cols = 96, .quantise = true},
    {.format = WeightFormat::kNvfp4, .tokens = 3, .rows = 16, .cols = 80, .quantise = true},
    {.format = WeightFormat::kNvfp4,
     .tokens = 5,
     .rows = 20,
     .cols = 128,
     .quantise = true,
     .is_mxfp4_cast = true},
};

// Only on a real device: the projections of the model (and what a GPU's split sees).
inline constexpr ShapeCase kRealLinears[] = {
    {.format = WeightFormat::kFp8Block128,
     .tokens = 1,
     .rows = 32768,
     .cols = 1024,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 8,
     .rows = 4096,
     .cols = 8192,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 64,
     .rows = 1536,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 300,
     .rows = 4096,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 2048,
     .rows = 1024,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 9, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kFp8Block128, .tokens = 500, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 8, .rows = 256, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 64, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 200, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 1, .rows = 16160, .cols = 4096},
};

// The operands on the host; x lies in rows of K + 3 or 4, out in rows of N + 5.
struct HostCase {
  explicit HostCase(const ShapeCase& shape_in) : shape(shape_in) {
    const ShapeCase& c = shape;
    whole = RandomWeight(7, c.format, c.first_row + c.rows, c.cols);
    if (c.first_col != 0) {  // One column of scale blocks more than the columns need.
      const int64_t blocks = (c.first_row + c.rows + 127) / 128;
      whole.scales.assign(static_cast<size_t>(blocks * ((c.first_col + c.cols + 127) / 128)), 0);
      for (size_t i = 0; i < whole.scales.size(); ++i) {
        whole.scales[i] = static_cast<uint8_t>(118 + i % 5);
      }
      whole.view.scales = whole.scales.data();
      whole.view.first_col = c.first_col;
    }
    if (c.is_mxfp4_cast) {  // Pairs of equal powers of two.
      for (size_t i = 0; i < whole.scales.size(); ++i) {
        whole.scales[i] = static_cast<uint8_t>((5 + i / 2 % 4) << 3);
      }
      whole.view.is_mxfp4_cast = true;
    }
    weight = RowSlice(whole.view, c.first_row, c.rows);
    x = OutlierValues(8, c.tokens * x_stride());
    for (float& value : x) value = c.is_rounded ? RoundBf16(value) : value;
  }
  // Every second K has rows that 16-byte loads can read.
  int64_t x_stride() const { return shape.cols + (shape.cols % 8 == 0 ? 4 : 3); }
  int64_t out_stride() const { return shape.rows + 5; }

  LinearArgs Args(const float* in, const WeightView& w, float* out, int64_t stride) const {
    return {.x = {const_cast<float*>(in), DType::kF32, shape.tokens, shape.cols, x_stride()},
            .weight = w,
            .out = {out, DType::kF32, shape.tokens, shape.rows, stride},
            .quantise_input = shape.quantise};
  }
  std::vector<float> Run(absl::Status (*operation)(const LinearArgs&, const Exec&),
                         bool round) const {
    std::vector<float> out(static_cast<size_t>(shape.tokens * shape.rows));
    LinearArgs args = Args(x.data(), weight, out.data(), shape.rows);
    args.round_output = round;
    const absl::Status status = operation(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  // The definition's loops with f32 sums, for the outputs [begin, end) of all tokens.
  std::vector<float> Naive() const {
    std::vector<float> q(x.size());
    const MatrixView in = Args(x.data(), weight, nullptr, 0).x;
    const MatrixView quantised = {q.data(), DType::kF32, in.rows, in.cols, in.row_stride};
    if (shape.quantise) {
      EXPECT_TRUE(QuantiseActivation(in, quantised, Exec{}).ok());
    } else {
      q = x;
    }
    std::vector<float> out;
    std::vector<float> decoded(static_cast<size_t>(shape.rows * shape.cols));
    for (int64_t n = 0; n < shape.rows; ++n) {
      for (int64_t k = 0; k < shape.cols; ++k) {
        decoded[static_cast<size_t>(n * shape.cols + k)] =
            static_cast<float>(WeightValue(weight, n, k));
      }
    }
    for (int64_t t = 0; t < shape.tokens; ++t) {
      for (int64_t n = 0; n < shape.rows; ++n) {
        const float* w = decoded.data() + n * shape.cols;
        float sum = 0.0f;
        for (int64_t k = 0; k < shape.cols; ++k) sum += quantised.f32(t)[k] * w[k];
        out.push_back(sum);
      }
    }
    return out;
  }

  ShapeCase shape;
  OwnedWeight whole;
  WeightView weight;
  std::vector<float> x;
};

// The [tokens, N] inside rows of `stride`; what lies between the rows must be NaN as before.
inline std::vector<float> Dense(const std::vector<float>& wide, const ShapeCase& c,
                                int64_t stride) {
  std::vector<float> out;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t n = 0; n < stride; ++n) {
      const float value = wide[static_cast<size_t>(t * stride + n)];
      if (n < c.rows) {
        out.push_back(value);
      } else {
        EXPECT_TRUE(std::isnan(value)) << "a write at " << t << ", " << n;
      }
    }
  }
  return out;
}

}  // namespace isthmus::kernels::testing
