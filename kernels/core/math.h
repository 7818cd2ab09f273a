// SPDX-License-Identifier: Apache-2.0
// exp, log1p, sigmoid, sqrt(softplus), sin and cos from one implementation of ours: the same bits
// on every machine, SIMD target and GPU, never libm. The vectorised forms in simd-inl.h give the
// same bits as the scalar f32 forms here, lane by lane.
//
// Reductions are Cody and Waite's with fused multiply-add, polynomials are Taylor series on the
// reduced range, long enough that their remainder is below the last bit. Every step is one IEEE
// operation, so the bits depend on no library and no compiler.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/core/host_device.h"

namespace isthmus::kernels {

// f64 e^x and log x within a few ulp, for tables that are built once (RoPE frequencies) and for the
// functions below. ExpF64: 0 below about -745, +infinity above about 709.8. LogF64: log 0 is
// -infinity, log of a negative number NaN.
ISTHMUS_HOST_DEVICE inline double ExpF64(double x);
ISTHMUS_HOST_DEVICE inline double LogF64(double x);

namespace math {

// 2^exponent as an f64 for exponent in [-1022, 1023].
ISTHMUS_HOST_DEVICE inline double PowerOfTwoF64(int64_t exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

inline constexpr double kRoundF64 = 0x1.8p52;  // Adding it rounds to an integer in the low bits.

// The integer that `shifted` - kRoundF64 is.
ISTHMUS_HOST_DEVICE inline int64_t WholePart(double shifted) {
  return static_cast<int64_t>(std::bit_cast<uint64_t>(shifted) -
                              std::bit_cast<uint64_t>(kRoundF64));
}

inline constexpr double kLn2High = 0x1.62e42fefa39efp-1;
inline constexpr double kLn2Low = 0x1.abc9e3b39803fp-56;

// log(1 + y) for y >= 0, with full relative precision for tiny y.
ISTHMUS_HOST_DEVICE inline double Log1pF64(double y) {
  const double u = 1.0 + y;
  return LogF64(u) + (y - (u - 1.0)) / u;
}

}  // namespace math

// f32 e^x within 2 ulp; 0 below about -104, +infinity above about 88.8; NaN stays NaN.
ISTHMUS_HOST_DEVICE inline float Exp(float x) {
  if (std::isnan(x)) return x;
  float clamped = x > -105.0f ? x : -105.0f;
  clamped = clamped < 89.0f ? clamped : 89.0f;
  const float magic = 0x1.8p23f;
  const float shifted = std::fma(clamped, 0x1.715476p+0f, magic);
  const float n = shifted - magic;
  float r = std::fma(n, -0x1.63p-1f, clamped);
  r = std::fma(n, 0x1.bd0106p-13f, r);
  float p = 1.0f / 5040.0f;
  p = std::fma(p, r, 1.0f / 720.0f);
  p = std::fma(p, r, 1.0f / 120.0f);
  p = std::fma(p, r, 1.0f / 24.0f);
  p = std::fma(p, r, 1.0f / 6.0f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(magic);
  const int32_t half = whole >> 1;
  const float a = std::bit_cast<float>((half + 127) << 23);
  const float b = std::bit_cast<float>((whole - half + 127) << 23);
  return p * a * b;
}

// 1 / (1 + e^-x), f32.
ISTHMUS_HOST_DEVICE inline float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// sqrt(log(1 + e^x)), safe for every x (specification 5.1); computed in f64, rounded to f32.
ISTHMUS_HOST_DEVICE inline float SqrtSoftplus(float x) {
  // Above 40, e^-x is below the last bit of x.
  const double softplus = x > 40.0f ? double{x} : math::Log1pF64(ExpF64(x));
  return static_cast<float>(std::sqrt(softplus));
}

// sin and cos of an f32 angle with full range reduction, computed in f64, rounded to f32.
// |angle| < 2^31.
ISTHMUS_HOST_DEVICE inline void SinCos(float angle, float* sin, float* cos) {
  // Multiples of pi / 2 in two parts: the products are exact inside the fused multiply-add, so for
  // |angle| < 2^31 the reduced angle is off by less than 2^-52.
  constexpr double kHalfPiHigh = 0x1.921fb54442d18p+0;
  constexpr double kHalfPiLow = 0x1.1a62633145c07p-54;
  const double shifted = std::fma(double{angle}, 0x1.45f306dc9c883p-1, math::kRoundF64);
  const double n = shifted - math::kRoundF64;
  const double r = std::fma(-n, kHalfPiLow, std::fma(-n, kHalfPiHigh, double{angle}));
  const double r2 = r * r;

  double s = 1.0 / 355687428096000.0;  // 1 / 17!
  s = std::fma(s, r2, -1.0 / 1307674368000.0);
  s = std::fma(s, r2, 1.0 / 6227020800.0);
  s = std::fma(s, r2, -1.0 / 39916800.0);
  s = std::fma(s, r2, 1.0 / 362880.0);
  s = std::fma(s, r2, -1.0 / 5040.0);
  s = std::fma(s, r2, 1.0 / 120.0);
  s = std::fma(s, r2, -1.0 / 6.0);
  const double sin_r = std::fma(s * r2, r, r);

  double c = 1.0 / 20922789888000.0;  // 1 / 16!
  c = std::fma(c, r2, -1.0 / 87178291200.0);
  c = std::fma(c, r2, 1.0 / 479001600.0);
  c = std::fma(c, r2, -1.0 / 3628800.0);
  c = std::fma(c, r2, 1.0 / 40320.0);
  c = std::fma(c, r2, -1.0 / 720.0);
  c = std::fma(c, r2, 1.0 / 24.0);
  c = std::fma(c, r2, -0.5);
  const double cos_r = std::fma(c, r2, 1.0);

  const int64_t quadrant = math::WholePart(shifted) & 3;
  const bool swap = (quadrant & 1) != 0;
  const double sin_abs = swap ? cos_r : sin_r;
  const double cos_abs = swap ? sin_r : cos_r;
  *sin = static_cast<float>((quadrant & 2) != 0 ? -sin_abs : sin_abs);
  *cos = static_cast<float>(quadrant == 1 || quadrant == 2 ? -cos_abs : cos_abs);
}

ISTHMUS_HOST_DEVICE inline double ExpF64(double x) {
  if (std::isnan(x)) return x;
  double clamped = x > -750.0 ? x : -750.0;
  clamped = clamped < 710.0 ? clamped : 710.0;
  const double shifted = std::fma(clamped, 0x1.71547652b82fep+0, math::kRoundF64);
  const double n = shifted - math::kRoundF64;
  const double r = std::fma(-n, math::kLn2Low, std::fma(-n, math::kLn2High, clamped));
  double p = 1.0;
  // Horner over 1 / k!: p = 1 + r / 1 * (1 + r / 2 * ( ... )).
  constexpr double kInverse[] = {1.0,      1.0 / 2,  1.0 / 3,  1.0 / 4, 1.0 / 5,
                                 1.0 / 6,  1.0 / 7,  1.0 / 8,  1.0 / 9, 1.0 / 10,
                                 1.0 / 11, 1.0 / 12, 1.0 / 13, 1.0 / 14};
  for (int k = 13; k >= 0; --k) p = std::fma(p, r * kInverse[k], 1.0);
  const int64_t whole = math::WholePart(shifted);
  const int64_t half = whole >> 1;
  return p * math::PowerOfTwoF64(half) * math::PowerOfTwoF64(whole - half);
}

ISTHMUS_HOST_DEVICE inline double LogF64(double x) {
  if (std::isnan(x)) return x;
  if (x < 0.0) return std::numeric_limits<double>::quiet_NaN();
  if (x == 0.0) return -std::numeric_limits<double>::infinity();
  if (std::isinf(x)) return x;
  int64_t exponent = 0;
  if (x < 0x1p-1022) {
    x *= 0x1p54;
    exponent = -54;
  }
  // m in [sqrt(1/2), sqrt(2)), found on the bits: the offset is that of sqrt(1/2).
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcd;
  const uint64_t offset = std::bit_cast<uint64_t>(x) - kRootHalf;
  const int64_t steps = static_cast<int64_t>(offset) >> 52;
  exponent += steps;
  const double m =
      std::bit_cast<double>(std::bit_cast<uint64_t>(x) - (static_cast<uint64_t>(steps) << 52));
  // log m = 2 atanh(s).
  const double s = (m - 1.0) / (m + 1.0);
  const double s2 = s * s;
  double p = 1.0 / 23;
  for (int k = 21; k >= 3; k -= 2) p = std::fma(p, s2, 1.0 / k);
  const double tail = 2.0 * s * s2 * p;
  const auto n = static_cast<double>(exponent);
  return std::fma(n, math::kLn2High, std::fma(n, math::kLn2Low, tail) + 2.0 * s);
}

}  // namespace isthmus::kernels
