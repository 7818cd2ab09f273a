// SPDX-License-Identifier: Apache-2.0
// Two 16-bit values in a register, the form in which tensor cores take them: conversions and
// products. Rounding to nearest even, subnormal values kept; the low half is the first value.
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/mma.cuh"

namespace isthmus::kernels {

#if ISTHMUS_EMULATED
namespace emulator {

inline uint32_t F16Bits(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const float a = std::fabs(x);
  if (std::isnan(x)) return 0x7fffu;
  if (a >= 65520.0f) return sign | 0x7c00u;
  if (a < 0x1p-14f) {  // Subnormal: multiples of 2^-24. Adding 1.5 * 2^-1 rounds to that grid.
    const float shifted = a + 0.75f;
    return sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.75f));
  }
  const auto abits = std::bit_cast<uint32_t>(a);
  const uint32_t rounded = (abits + 0xfffu + (abits >> 13 & 1u)) >> 13;
  return sign | (rounded - (112u << 10));
}
inline uint32_t Pair(uint32_t low, uint32_t high) { return high << 16 | low; }

}  // namespace emulator
#endif

__device__ __forceinline__ uint32_t Bf16Pair(float low, float high) {
#if ISTHMUS_EMULATED
  return emulator::Pair(Bf16Bits(low), Bf16Bits(high));
#else
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
// The same with negative values made +0. NaN stays NaN.
__device__ __forceinline__ uint32_t Bf16PairRelu(float low, float high) {
#if ISTHMUS_EMULATED
  return emulator::Pair(Bf16Bits(low < 0.0f ? 0.0f : low), Bf16Bits(high < 0.0f ? 0.0f : high));
#else
  uint32_t pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
__device__ __forceinline__ float LowBf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float HighBf16(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Too large becomes infinite.
__device__ __forceinline__ uint32_t F16Pair(float low, float high) {
#if ISTHMUS_EMULATED
  return emulator::Pair(emulator::F16Bits(low), emulator::F16Bits(high));
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
#endif
}
// The two values of a pair. Exact.
__device__ __forceinline__ void F32OfF16Pair(uint32_t pair, float& low, float& high) {
#if ISTHMUS_EMULATED
  low = emulator::Half16Value(static_cast<uint16_t>(pair), false);
  high = emulator::Half16Value(static_cast<uint16_t>(pair >> 16), false);
#else
  asm("{\n\t.reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.f32.f16 %0, low;\n\t"
      "cvt.f32.f16 %1, high;\n\t}"
      : "=f"(low), "=f"(high)
      : "r"(pair));
#endif
}
// The f16 values of two e4m3 codes, in the low 16 bits. Exact.
__device__ __forceinline__ uint32_t F16PairOfE4m3(uint32_t codes) {
#if ISTHMUS_EMULATED
  return F16Pair(Fp8E4m3Value(static_cast<uint8_t>(codes)),
                 Fp8E4m3Value(static_cast<uint8_t>(codes >> 8)));
#else
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(codes)));
  return pair;
#endif
}
// The f16 values of four e4m3 codes: the two low ones, and the two high ones.
// Exact. As two calls of the above it would cost a shift.
__device__ __forceinline__ void F16PairsOfE4m3(uint32_t codes, uint32_t& low, uint32_t& high) {
#if ISTHMUS_EMULATED
  low = F16PairOfE4m3(codes & 0xffffu);
  high = F16PairOfE4m3(codes >> 16);
#else
  asm("{\n\t.reg .b16 low, high;\n\t"
      "mov.b32 {low, high}, %2;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, low;\n\t"
      "cvt.rn.f16x2.e4m3x2 %1, high;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(codes));
#endif
}
// The e4m3 codes of four values, the first in the low byte; too large becomes 448, NaN stays NaN.
__device__ __forceinline__ uint32_t E4m3Codes(float a, float b, float c, float d) {
#if ISTHMUS_EMULATED
  return uint32_t{Fp8E4m3Code(a)} | uint32_t{Fp8E4m3Code(b)} << 8 | uint32_t{Fp8E4m3Code(c)} << 16 |
         uint32_t{Fp8E4m3Code(d)} << 24;
#else
  uint16_t low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(b), "f"(a));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(d), "f"(c));
  return uint32_t{high} << 16 | low;
#endif
}
// The products of the low halves and of the high halves.
__device__ __forceinline__ uint32_t MultiplyF16Pair(uint32_t a, uint32_t b) {
#if ISTHMUS_EMULATED
  const auto value = [](uint32_t bits) {
    return emulator::Half16Value(static_cast<uint16_t>(bits), false);
  };
  return F16Pair(value(a) * value(b), value(a >> 16) * value(b >> 16));
#else
  uint32_t pair;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#endif
}
// The same of bf16: each product rounded once, as Bf16Pair rounds it.
__device__ __forceinline__ uint32_t MultiplyBf16Pair(uint32_t a, uint32_t b) {
#if ISTHMUS_EMULATED
  return Bf16Pair(LowBf16(a) * LowBf16(b), HighBf16(a) * HighBf16(b));
#else
  uint32_t pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
#endif
}

}  // namespace isthmus::kernels
