// SPDX-License-Identifier: Apache-2.0
// The Walsh-Hadamard transform in natural (Sylvester) order, without its factor n^-0.5. Every
// butterfly is one sum and one difference, so any vector width gives these bits; f64 for the
// definitions. Source: model specification 3.8.
#pragma once

#include <cstdint>

namespace isthmus::kernels {

// x[n] in place; n a power of two.
template <typename Real>
void HadamardButterflies(Real* x, int64_t n) {
  for (int64_t stride = 1; stride < n; stride *= 2) {
    for (int64_t i = 0; i < n; i += 2 * stride) {
      for (int64_t j = i; j < i + stride; ++j) {
        const Real a = x[j];
        const Real b = x[j + stride];
        x[j] = a + b;
        x[j + stride] = a - b;
      }
    }
  }
}

}  // namespace isthmus::kernels
