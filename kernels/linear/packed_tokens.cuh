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
