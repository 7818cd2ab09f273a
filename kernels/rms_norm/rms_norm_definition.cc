// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against the formula in rms_norm.h, never to be fast:
// no blocking, no intrinsics, f64 throughout, one loop per sum in the formula.
#include <cmath>

#include "kernels/core/formats.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rms_norm/rms_norm_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::Status RmsNormDefinition(const RmsNormArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateRmsNorm(args));
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const float* x = args.x.f32(t);
    float* out = args.out.f32(t);

    double sum_of_squares = 0.0;
    for (int64_t d = 0; d < args.x.cols; ++d) sum_of_squares += double{x[d]} * x[d];
    const double mean = sum_of_squares / static_cast<double>(args.x.cols);
    const double scale = 1.0 / std::sqrt(mean + args.epsilon);

    for (int64_t d = 0; d < args.x.cols; ++d) {
      const double weight = args.weight.size != 0 ? args.weight.f32()[d] : 1.0;
      const auto value = static_cast<float>(x[d] * scale * weight);
      out[d] = args.arithmetic == Arithmetic::kReference ? RoundBf16(value) : value;
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
