// SPDX-License-Identifier: Apache-2.0
// Seeded inputs and random weights: the same on every machine, so that a failure can be repeated
// from its seed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/core/weight.h"

namespace isthmus::kernels::testing {

// xorshift64*: fast, seeded, the same everywhere (std::normal_distribution is not).
class Random {
 public:
  explicit Random(uint64_t seed);

  uint64_t Bits();
  int64_t Below(int64_t n);  // Uniform in [0, n).
  float Uniform(float low, float high);
  float Normal();  // Mean 0, variance 1 (sum of twelve uniforms).

 private:
  uint64_t state_;
};

// n values of mean 0 and deviation `scale`.
std::vector<float> NormalValues(uint64_t seed, int64_t n, float scale = 1.0f);
// The same with one value in 64 twenty times larger, as activations have them.
std::vector<float> OutlierValues(uint64_t seed, int64_t n, float scale = 1.0f);

// A weight and the memory that it lies in. Movable, not copyable: the view points inside.
struct OwnedWeight {
  OwnedWeight() = default;
  OwnedWeight(OwnedWeight&&) = default;
  OwnedWeight& operator=(OwnedWeight&&) = default;

  WeightView view;
  std::vector<uint64_t> elements;  // As words, so that f32 elements are aligned.
  std::vector<uint8_t> scales;
};

// A random [rows, cols] weight, row-major, with entries of about 1 / sqrt(cols) and scales that
// differ from group to group. fp8 and fp4 codes are never NaN.
OwnedWeight RandomWeight(uint64_t seed, WeightFormat format, int64_t rows, int64_t cols);
// A weight with given values: exact for kF32; rounded to bf16 for kBf16. Other formats: check-fail.
OwnedWeight WeightFrom(WeightFormat format, int64_t rows, int64_t cols,
                       const std::vector<float>& values);
// `w` repacked into panels. fp8 scales are shared with `w`.
OwnedWeight Packed(const WeightView& w);

}  // namespace isthmus::kernels::testing
