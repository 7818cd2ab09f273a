// SPDX-License-Identifier: Apache-2.0
// The tokens of a linear as the B operands of its mma.sync: units of four k steps of the weights
// (128 inputs of fp8, 64 of bf16), each in the order in which lanes load it. With kTiles tiles of 8
// tokens, for token 8 tile + g and lane 4 g + t:
//
//   e4m3, bf16   words [step][lane][2] for one tile, else [step][tile / 2][lane][tile % 2][2]: b[0]
//                and b[1] of the step
//   f16          words [step][tile][lane][4]: those of inputs (4t, 4t + 1), (4t + 2, 4t + 3), then
//                the same from 16 on, which is how a word of four fp8 weights falls into two
//                m16n8k16
//   e4m3, f16    then the scales of the tokens' groups, [8 kTiles] f32
//   bf16, f16    then 16 bytes, of which the first word says whether the low parts follow that
//                matter; then the words of the low parts, what rounding left of x
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

inline constexpr int kUnitSteps = 4;  // k steps of a unit: 512 bytes each of a row of tiles.
inline constexpr int kMaxTasks = 8;   // Linears of one launch.

// What is multiplied with what.
enum class Product : uint8_t {
  kE4m3,       // fp8 weights with tokens quantised to e4m3.
  kE4m3ByF16,  // fp8 weights, as f16, with tokens in f16 times a power of two a group.
  kBf16,       // bf16 weights with tokens in bf16.
};
ISTHMUS_HOST_DEVICE constexpr bool HasScales(Product p) { return p != Product::kBf16; }
ISTHMUS_HOST_DEVICE constexpr bool HasLowParts(Product p) { return p != Product::kE4m3; }

ISTHMUS_HOST_DEVICE constexpr int UnitInputs(Product p) { return HasScales(p) ? 128 : 64; }
// Of the first words of a unit, of all that precedes the low parts, and of the unit.
ISTHMUS_HOST_DEVICE constexpr int UnitWordBytes(Product p, int tiles) {
  return tiles * kUnitSteps * (p == Product::kE4m3ByF16 ? 512 : 256);
}
ISTHMUS_HOST_DEVICE constexpr int UnitHeadBytes(Product p, int tiles) {
  return UnitWordBytes(p, tiles) + (HasScales(p) ? tiles * 32 : 0) + (HasLowParts(p) ? 16 : 0);
}
ISTHMUS_HOST_DEVICE constexpr int UnitBytes(Product p, int tiles) {
  return UnitHeadBytes(p, tiles) + (HasLowParts(p) ? UnitWordBytes(p, tiles) : 0);
}
// Of the word that says whether low parts matter.
ISTHMUS_HOST_DEVICE constexpr int UnitFlagByte(Product p, int tiles) {
  return UnitHeadBytes(p, tiles) - 16;
}
// Index of the word, or first of two words, of half h of a step, of a token in `tile`.
ISTHMUS_HOST_DEVICE constexpr int WordInUnit(Product p, int tiles, int step, int tile, int lane,
                                             int h) {
  if (p == Product::kE4m3ByF16) return ((step * tiles + tile) * kWarpLanes + lane) * 4 + 2 * h;
  if (tiles == 1) return (step * kWarpLanes + lane) * 2 + h;
  return ((step * (tiles / 2) + tile / 2) * kWarpLanes + lane) * 4 + tile % 2 * 2 + h;
}

// ---- Words of neighbouring inputs

// e4m3 codes of value * inverse.
__device__ __forceinline__ uint32_t E4m3Word(const float (&value)[4], float inverse) {
  return E4m3Codes(value[0] * inverse, value[1] * inverse, value[2] * inverse, value[3] * inverse);
}

// x rounded to bf16, y what that leaves.
__device__ __forceinline__ uint2 SplitBf16(const float (&value)[2]) {
  const uint32_t high = Bf16Pair(value[0], value[1]);
  const float rest[2] = {value[0] - LowBf16(high), value[1] - HighBf16(high)};
  const uint32_t low = Bf16Pair(fabsf(rest[0]) < INFINITY ? rest[0] : 0.0f,
                                fabsf(rest[1]) < INFINITY ? rest[1] : 0.0f);
  return make_uint2(high, low);
}

// Of the power of two whose multiples f16 words are, from the largest magnitude of a unit, which
// becomes at most 2^14, so that what f16 cannot hold is below 2^-38 of it.
inline constexpr float kF16AmaxFloor = 1e-30f;
__device__ __forceinline__ int F16UnitExponent(float amax) { return CeilLog2(amax) - 14; }

// value * inverse in f16: two words (x, y) rounded to 11 bits, and (z, w) what that leaves.
__device__ __forceinline__ uint4 SplitF16(const float (&value)[4], float inverse) {
  float high[4];
  float low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float v = value[i] * inverse;
    const float spread = v * 8193.0f;  // 2^13 + 1: leaves the upper 11 of 24 bits.
    const float rounded = spread - (spread - v);
    const bool is_finite = fabsf(v) < INFINITY;
    high[i] = is_finite ? rounded : v;
    low[i] = is_finite ? v - rounded : 0.0f;
  }
  return make_uint4(F16Pair(high[0], high[1]), F16Pair(high[2], high[3]), F16Pair(low[0], low[1]),
                    F16Pair(low[2], low[3]));
}

// Inputs of up to kMaxTasks linears.
struct PackArgs {
  const float* x[kMaxTasks];  // [tokens, K], rows x_stride apart
  int64_t x_stride[kMaxTasks];
  uint8_t* units;  // [input][unit][UnitBytes]
  int64_t cols;    // K
  int tokens;
  int tiles;  // Of 8 tokens, in a block of tokens: 1, 2, 4, 8 or 16.
};

}  // namespace isthmus::kernels
