// SPDX-License-Identifier: Apache-2.0
// The definition. Written to be read against the formula in experts.h, never to be fast: token by
// token, f64 sums, rounding where the formula rounds.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/core/nvfp4_rows.h"
#include "kernels/experts/experts_variants.h"

namespace isthmus::kernels {
namespace {

using Row = std::vector<double>;

// The rounding of a result, in the reference arithmetic only.
double Round(double x, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kReference ? RoundBf16(static_cast<float>(x)) : x;
}

// What q of rows that meet fp4 is.
enum class RowsOfFp4 : uint8_t { kE4m3, kNvfp4 };

// q(x) as NVFP4, with exact products.
Row QuantisedNvfp4(const Row& x) {
  const auto bits = [&](size_t i) { return MagnitudeBits(static_cast<float>(x[i])); };
  uint32_t amax = 0;
  for (size_t i = 0; i < x.size(); ++i) amax = std::max(amax, bits(i));
  const float row_scale = Nvfp4RowScale(amax);
  Row out(x.size());
  for (size_t k = 0; k < x.size(); k += kNvfp4Group) {
    const size_t end = std::min(k + kNvfp4Group, x.size());
    uint32_t largest = 0;
    for (size_t i = k; i < end; ++i) largest = std::max(largest, bits(i));
    const uint8_t scale = Nvfp4GroupScale(largest, row_scale);
    const float inverse = Nvfp4Inverse(scale, row_scale);
    for (size_t i = k; i < end; ++i) {
      const uint8_t code = Fp4E2m1Code(static_cast<float>(x[i]) * inverse);
      out[i] = double{Fp4E2m1Value(code)} * Fp8E4m3Value(scale) * row_scale;
    }
  }
  return out;
}

// q(x): the e4m3 1x128 round trip where the weight asks for it.
Row Quantised(const Row& x, const WeightView& w, Arithmetic arithmetic, RowsOfFp4 rows) {
  if (!QuantisesInput(w, arithmetic)) return x;
  if (rows == RowsOfFp4::kNvfp4 && IsFp4(w.format)) return QuantisedNvfp4(x);
  Row out(x.size());
  for (size_t k = 0; k < x.size(); k += kActivationGroup) {
    const size_t end = std::min(k + kActivationGroup, x.size());
    float amax = 0.0f;
    for (size_t i = k; i < end; ++i) amax = std::max(amax, std::fabs(static_cast<float>(x[i])));
    const float scale = PowerOfTwo(Fp8ScaleExponent(amax));
    for (size_t i = k; i < end; ++i) {
      out[i] = Fp8E4m3Value(Fp8E4m3Code(static_cast<float>(x[i]) / scale)) * scale;
    }
  }
  return out;
}

Row Multiply(const Row& x, const WeightView& w, Arithmetic arithmetic, RowsOfFp4 rows) {
  const Row q = Quantised(x, w, arithmetic, rows);
  Row out(static_cast<size_t>(w.rows));
  for (int64_t n = 0; n < w.rows; ++n) {
    double sum = 0.0;
    for (int64_t k = 0; k < w.cols; ++k) sum += q[static_cast<size_t>(k)] * WeightValue(w, n, k);
    out[static_cast<size_t>(n)] = Round(sum, arithmetic);
  }
  return out;
}

// One expert for one token.
Row ExpertOutput(const Row& x, const ExpertWeights& e, double limit, double weight,
                 Arithmetic arithmetic, RowsOfFp4 rows) {
  const Row gate = Multiply(x, e.w1, arithmetic, rows);
  const Row up = Multiply(x, e.w3, arithmetic, rows);
  Row h(gate.size());
  for (size_t i = 0; i < h.size(); ++i) {
    double g = gate[i];
    double u = up[i];
    if (limit > 0.0) {
      g = std::min(g, limit);
      u = std::clamp(u, -limit, limit);
    }
    const double silu = g / (1.0 + std::exp(-g));
    h[i] = Round(silu * u * weight, arithmetic);
  }
  return Multiply(h, e.w2, arithmetic, rows);
}

absl::Status Define(const ExpertsArgs& args, RowsOfFp4 rows) {
  const auto hidden = static_cast<size_t>(args.x.cols);
  for (int64_t t = 0; t < args.x.rows; ++t) {
    const Row x(args.x.f32(t), args.x.f32(t) + hidden);
    Row routed(hidden, 0.0);
    for (size_t id = 0; id < args.experts.size(); ++id) {  // Ascending expert id.
      for (int64_t j = 0; j < args.k; ++j) {
        if (args.ids[t * args.k + j] != static_cast<int32_t>(id)) continue;
        const Row y = ExpertOutput(x, args.experts[id], args.limit, args.weights[t * args.k + j],
                                   args.arithmetic, rows);
        for (size_t d = 0; d < hidden; ++d) routed[d] += y[d];
      }
    }
    Row shared(hidden, 0.0);
    if (args.shared != nullptr) {
      shared =
          ExpertOutput(x, *args.shared, args.shared_limit, 1.0, args.arithmetic, RowsOfFp4::kE4m3);
    }
    for (size_t d = 0; d < hidden; ++d) {
      if (args.routed.data != nullptr) args.routed.f32(t)[d] = static_cast<float>(routed[d]);
      args.out.f32(t)[d] = static_cast<float>(Round(routed[d] + shared[d], args.arithmetic));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ExpertsDefinition(const ExpertsArgs& args, const Exec&) {
  return Define(args, RowsOfFp4::kE4m3);
}
absl::Status ExpertsDefinitionW4A4(const ExpertsArgs& args, const Exec&) {
  return Define(args, RowsOfFp4::kNvfp4);
}

}  // namespace isthmus::kernels
