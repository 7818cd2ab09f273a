// SPDX-License-Identifier: Apache-2.0
// Rows of activations as NVFP4 (model specification 6.3): e2m1 codes under an e4m3 scale for every
// 16 under an f32 scale of the row.
//
//   s  = amax(row) / (6 * 448)
//   sb = e4m3( amax(its 16) / (6 s) )
//   q  = e2m1( x / (sb s) ),     x is about q * sb * s
//
// The specification takes s from a calibration, one for all rows of a projection; here it is the
// row's own, so that no row saturates, and none depends on another one. Each operation rounds to
// f32 once, so that a CPU and a GPU have the same bits. A row whose amax is below 2^-100 is zero;
// one with a value that is not finite has scales that are NaN, all of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "kernels/core/formats.h"
#include "kernels/core/host_device.h"

namespace isthmus::kernels {

inline constexpr int kNvfp4Group = 16;  // Elements under one scale.

// The order of magnitudes, NaN above infinity: what amax is the largest of.
ISTHMUS_HOST_DEVICE inline uint32_t MagnitudeBits(float x) {
  return std::bit_cast<uint32_t>(x) & 0x7fffffffu;
}

// s. amax: the largest of MagnitudeBits.
ISTHMUS_HOST_DEVICE inline float Nvfp4RowScale(uint32_t amax) {
  const auto value = std::bit_cast<float>(amax);
  return value < 0x1p-100f ? 0.0f : value / (6.0f * 448.0f);
}

// sb of 16 values, as a code without sign.
ISTHMUS_HOST_DEVICE inline uint8_t Nvfp4GroupScale(uint32_t amax, float row_scale) {
  if (row_scale == 0.0f) return 0;
  if (MagnitudeBits(row_scale) >= 0x7f800000u) return 0x7f;
  return Fp8E4m3Code(std::bit_cast<float>(amax) / (6.0f * row_scale));
}

// 1 / (sb s), which the values of a group are multiplied with; 0 where their codes are 0.
ISTHMUS_HOST_DEVICE inline float Nvfp4Inverse(uint8_t group_scale, float row_scale) {
  if (group_scale == 0 || group_scale == 0x7f) return 0.0f;
  return 1.0f / (Fp8E4m3Value(group_scale) * row_scale);
}

// out = what the codes of x[n] stand for; the last group may be short. out may be x.
inline void RoundTripNvfp4Row(const float* x, int64_t n, float* out) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < n; ++i) amax = std::max(amax, MagnitudeBits(x[i]));
  const float row_scale = Nvfp4RowScale(amax);
  for (int64_t first = 0; first < n; first += kNvfp4Group) {
    const int64_t end = std::min<int64_t>(n, first + kNvfp4Group);
    uint32_t largest = 0;
    for (int64_t i = first; i < end; ++i) largest = std::max(largest, MagnitudeBits(x[i]));
    const uint8_t scale = Nvfp4GroupScale(largest, row_scale);
    const float inverse = Nvfp4Inverse(scale, row_scale);
    for (int64_t i = first; i < end; ++i) {
      out[i] = Fp4E2m1Value(Fp4E2m1Code(x[i] * inverse)) * Fp8E4m3Value(scale) * row_scale;
    }
  }
}

}  // namespace isthmus::kernels
