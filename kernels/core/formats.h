// SPDX-License-Identifier: Apache-2.0
// Number formats: scalar codecs that define each format, bit for bit. Vectorised codecs live beside
// the loops that use them and are tested against these. Every rounding is to nearest even.
//
//   bf16      the upper half of an f32
//   fp8_e4m3  1-4-3, bias 7, no infinity, largest 448, NaN = 0x7f / 0xff
//   fp4_e2m1  1-2-1: 0 0.5 1 1.5 2 3 4 6 and their negatives (code 8 is -0)
//   ue8m0     2^(byte - 127); 255 is NaN
// Source: model specification 2.7, 3.2, 3.8 and 6.1.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/core/host_device.h"

namespace isthmus::kernels {

ISTHMUS_HOST_DEVICE inline uint16_t Bf16Bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
ISTHMUS_HOST_DEVICE inline float Bf16Value(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

// Rounds to the bf16 grid.
ISTHMUS_HOST_DEVICE inline float RoundBf16(float x) { return Bf16Value(Bf16Bits(x)); }

ISTHMUS_HOST_DEVICE inline float Fp8E4m3Value(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  // With the exponent bias of f32 the value is 2^-120 of what it should be; the product is exact.
  const float value = std::bit_cast<float>(magnitude << 20) * 0x1p120f;
  return (code & 0x80u) != 0 ? -value : value;
}

// Saturating. The sign of zero is kept; NaN gives the NaN code.
ISTHMUS_HOST_DEVICE inline uint8_t Fp8E4m3Code(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const auto sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  const float a = std::fabs(x);
  if (std::isnan(x)) return static_cast<uint8_t>(sign | 0x7fu);
  if (a >= 448.0f) return static_cast<uint8_t>(sign | 0x7eu);
  if (a < 0x1p-6f) {  // Subnormal: multiples of 2^-9. Adding 2^14 rounds to that grid.
    const float shifted = a + 0x1.8p14f;
    const uint32_t steps = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1.8p14f);
    return static_cast<uint8_t>(sign | steps);
  }
  const auto abits = std::bit_cast<uint32_t>(a);
  const uint32_t rounded = abits + 0x7ffffu + ((abits >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return static_cast<uint8_t>(sign | std::min(code, 0x7eu));
}

inline constexpr std::array<float, 16> kFp4E2m1Values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,
                                                         4.0f,  6.0f,  -0.0f, -0.5f, -1.0f, -1.5f,
                                                         -2.0f, -3.0f, -4.0f, -6.0f};

ISTHMUS_HOST_DEVICE inline float Fp4E2m1Value(uint8_t code) {
  // With the exponent bias of f32 the value is 2^-126 of what it should be; the product is exact.
  const float value = std::bit_cast<float>((uint32_t{code} & 7u) << 22) * 0x1p126f;
  return (code & 8u) != 0 ? -value : value;
}

// Saturating at 6; ties to the even code. The sign of zero is kept.
ISTHMUS_HOST_DEVICE inline uint8_t Fp4E2m1Code(float x) {
  const uint8_t sign = std::signbit(x) ? 8 : 0;
  const float a = std::fabs(x);
  uint8_t code = 7;
  if (a <= 0.25f) {
    code = 0;
  } else if (a < 0.75f) {
    code = 1;
  } else if (a <= 1.25f) {
    code = 2;
  } else if (a < 1.75f) {
    code = 3;
  } else if (a <= 2.5f) {
    code = 4;
  } else if (a < 3.5f) {
    code = 5;
  } else if (a <= 5.0f) {
    code = 6;
  }
  return static_cast<uint8_t>(sign | code);
}

// 2^exponent as an f32 for exponent in [-149, 127].
ISTHMUS_HOST_DEVICE inline float PowerOfTwo(int exponent) {
  if (exponent >= -126) return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  return std::bit_cast<float>(1u << (exponent + 149));
}

ISTHMUS_HOST_DEVICE inline float Ue8m0Value(uint8_t byte) {
  return byte == 255 ? std::bit_cast<float>(0x7fc00000u) : PowerOfTwo(int{byte} - 127);
}

// ceil(log2(x)) of a positive normal f32, from its bits.
ISTHMUS_HOST_DEVICE inline int CeilLog2(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<int>((bits >> 23) & 0xffu) - 127 + ((bits & 0x7fffffu) != 0 ? 1 : 0);
}

inline constexpr float kInverse448 = 1.0f / 448.0f;  // 0x3B124925 (specification 2.7)
inline constexpr float kInverse6 = 1.0f / 6.0f;
inline constexpr float kFp8AmaxFloor = 1e-4f;  // On amax, not on the scale (4.2).
inline constexpr float kFp4AmaxFloor = 6.0f * 0x1p-126f;

// Exponent of the power-of-two scale of an fp8 group whose largest magnitude is `amax`.
ISTHMUS_HOST_DEVICE inline int Fp8ScaleExponent(float amax) {
  return CeilLog2((amax < kFp8AmaxFloor ? kFp8AmaxFloor : amax) * kInverse448);
}
// The same for an fp4 group.
ISTHMUS_HOST_DEVICE inline int Fp4ScaleExponent(float amax) {
  return CeilLog2((amax < kFp4AmaxFloor ? kFp4AmaxFloor : amax) * kInverse6);
}

// Entry formats of the cache (specification 4.2).
inline constexpr int kKvNopeBlock = 64;       // Elements under one scale of a KV entry.
inline constexpr int kIndexKeyBlock = 32;     // Elements under one scale of an index key.
inline constexpr int kActivationGroup = 128;  // Elements under one scale of an activation row.

}  // namespace isthmus::kernels
