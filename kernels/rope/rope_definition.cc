// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against the formula in rope.h, never to be fast. The angle is
// the f32 product, which is part of the contract; everything after it is f64. sin and cos are
// libm's, so that the definition shares nothing with what it is held against.
#include <cmath>

#include "kernels/core/formats.h"
#include "kernels/rope/rope.h"
#include "kernels/rope/rope_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::Status RopeDefinition(const RopeArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateRope(args));
  const auto pairs = static_cast<int64_t>(args.frequency.size());
  for (int64_t t = 0; t < args.x.rows; ++t) {
    for (int64_t h = 0; h < args.x.cols / args.head_dim; ++h) {
      float* x = args.x.f32(t) + (h + 1) * args.head_dim - 2 * pairs;
      for (int64_t i = 0; i < pairs; ++i) {
        const float angle = static_cast<float>(args.positions[t]) * args.frequency[i];
        const double theta = args.inverse ? -double{angle} : double{angle};
        const double a = x[2 * i];
        const double b = x[2 * i + 1];
        const auto even = static_cast<float>(a * std::cos(theta) - b * std::sin(theta));
        const auto odd = static_cast<float>(a * std::sin(theta) + b * std::cos(theta));
        const bool round = args.arithmetic == Arithmetic::kReference;
        x[2 * i] = round ? RoundBf16(even) : even;
        x[2 * i + 1] = round ? RoundBf16(odd) : odd;
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
