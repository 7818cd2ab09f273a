// SPDX-License-Identifier: Apache-2.0
// A matrix of floats in device memory for the tests of CUDA variants, as f32 or bf16.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/tensor.h"
#include "kernels/testing/device.h"

namespace isthmus::kernels::testing {

// A matrix of host floats in device memory, `gap` elements of NaN between rows, as f32 or bf16.
class DeviceMatrix {
 public:
  DeviceMatrix(const std::vector<float>& values, int64_t rows, int64_t cols, int64_t gap = 0,
               DType dtype = DType::kF32)
      : rows_(rows), cols_(cols), stride_(cols + gap), dtype_(dtype) {
    const size_t count = static_cast<size_t>(std::max<int64_t>(1, rows * stride_));
    std::vector<float> spread(count, std::nanf(""));
    for (int64_t r = 0; r < rows; ++r) {
      std::copy_n(values.begin() + r * cols, cols, spread.begin() + r * stride_);
    }
    if (dtype == DType::kF32) {
      floats_.emplace(spread);
    } else {
      std::vector<uint16_t> bits(count);
      std::transform(spread.begin(), spread.end(), bits.begin(), Bf16Bits);
      halves_.emplace(bits);
    }
  }
  MatrixView view() const {
    void* data = dtype_ == DType::kF32 ? static_cast<void*>(floats_->data()) : halves_->data();
    return {data, dtype_, rows_, cols_, stride_};
  }
  std::vector<float> ToHost() const {
    std::vector<float> spread;
    if (dtype_ == DType::kF32) {
      spread = floats_->ToHost();
    } else {
      for (const uint16_t bits : halves_->ToHost()) spread.push_back(Bf16Value(bits));
    }
    std::vector<float> out;
    for (int64_t r = 0; r < rows_; ++r) {
      const auto row = spread.begin() + r * stride_;
      out.insert(out.end(), row, row + cols_);
      // Nobody writes between rows.
      EXPECT_TRUE(std::all_of(row + cols_, row + stride_, [](float x) { return std::isnan(x); }));
    }
    return out;
  }
  ::testing::AssertionResult Intact() const {
    return dtype_ == DType::kF32 ? floats_->Intact() : halves_->Intact();
  }

 private:
  int64_t rows_, cols_, stride_;
  DType dtype_;
  std::optional<DeviceCopy<float>> floats_;
  std::optional<DeviceCopy<uint16_t>> halves_;
};

}  // namespace isthmus::kernels::testing
