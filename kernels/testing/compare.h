// SPDX-License-Identifier: Apache-2.0
// How kernel tests compare: relative L2 error within the bound of architecture C.2, the same places
// for NaN and infinity, bits, flips of a quantiser, and guard bytes around outputs. Failures name
// the worst coordinate, both values, the error, the bound and the share of it used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "services/base/patch.h"

namespace isthmus::kernels::testing {

// |got - exact| / |exact| in L2; plain |got| when exact is all zero. Places where both are the same
// infinity or both NaN count as equal.
double RelativeL2(std::span<const float> got, std::span<const float> exact);

// "worst at 17: got 1.5, exact 1.25", the place with the largest |got - exact|.
std::string WorstPlace(std::span<const float> got, std::span<const float> exact);

// NaN and infinity (with its sign) stand in the same places.
::testing::AssertionResult SameNonFinite(std::span<const float> got, std::span<const float> exact);

// e(got) <= bound.factor * e(naive) + bound.floor, and SameNonFinite.
::testing::AssertionResult WithinBound(std::span<const float> got, std::span<const float> naive,
                                       std::span<const float> exact,
                                       const NumericBound& bound = kTrustedBound);
// e(got) <= tolerance, and SameNonFinite: for golden files with a stated tolerance.
::testing::AssertionResult WithinRelativeL2(std::span<const float> got,
                                            std::span<const float> exact, double tolerance);

// The same bits; sizes too.
::testing::AssertionResult SameBits(std::span<const float> got, std::span<const float> expected);

// For outputs on the bf16 grid: no value more than one step from `exact`, and the share of values
// that differ at most `factor` times that of `naive`, plus `floor`.
::testing::AssertionResult Bf16FlipsWithin(std::span<const float> got, std::span<const float> naive,
                                           std::span<const float> exact, double factor = 2.0,
                                           double floor = 1e-3);

// `size` floats framed by guard bytes, filled with NaN so that a value left unwritten shows.
class GuardedFloats {
 public:
  explicit GuardedFloats(int64_t size);

  float* data();
  std::span<const float> values() const;
  // The guards on both sides are untouched.
  ::testing::AssertionResult Intact() const;

 private:
  static constexpr int64_t kGuard = 16;  // Floats, so the data keep 64-byte alignment.
  int64_t size_;
  std::vector<float> storage_;
  int64_t offset_ = 0;
};

}  // namespace isthmus::kernels::testing
