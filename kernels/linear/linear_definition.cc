// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against the formula in linear.h, never to be fast.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/linear/linear.h"

namespace isthmus::kernels {
namespace {

// The e4m3 1x128 round trip by the scalar codecs.
void QuantiseRow(const float* x, int64_t n, float* out) {
  for (int64_t k = 0; k < n; k += kActivationGroup) {
    const int64_t end = std::min(k + kActivationGroup, n);
    float amax = 0.0f;
    for (int64_t i = k; i < end; ++i) amax = std::max(amax, std::fabs(x[i]));
    const float scale = PowerOfTwo(Fp8ScaleExponent(amax));
    for (int64_t i = k; i < end; ++i) out[i] = Fp8E4m3Value(Fp8E4m3Code(x[i] / scale)) * scale;
  }
}

}  // namespace

absl::Status LinearDefinition(const LinearArgs& args, const Exec&) {
  const int64_t cols = args.x.cols;
  std::vector<float> x(static_cast<size_t>(cols));
  for (int64_t t = 0; t < args.x.rows; ++t) {
    std::copy_n(args.x.f32(t), cols, x.data());
    if (args.quantise_input) QuantiseRow(x.data(), cols, x.data());

    for (int64_t n = 0; n < args.weight.rows; ++n) {
      double sum = 0.0;
      for (int64_t k = 0; k < cols; ++k) {
        sum += x[static_cast<size_t>(k)] * WeightValue(args.weight, n, k);
      }
      const auto value = static_cast<float>(sum);
      args.out.f32(t)[n] = args.round_output ? RoundBf16(value) : value;
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
