// SPDX-License-Identifier: Apache-2.0
// The tokens of a linear as the B operands of its mma.sync: units of four k steps (128 inputs of
// e4m3, 64 of bf16), each in the order in which lanes load it. With kTiles tiles of 8 tokens:
//
//   words   [step][lane][2] for one tile, else [step][tile / 2][lane][tile % 2][2]: the words b[0],
//           b[1] of lane 4 g + t, for token 8 tile + g
//   e4m3    then the scales of the tokens' groups, [8 kTiles] f32
//   bf16    then 16 bytes, of which the first word says whether the low parts follow that matter;
//           then the words of the low parts, x - bf16(x)
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

inline constexpr int kUnitSteps = 4;  // k steps of a unit: 512 bytes each of a row of tiles.
inline constexpr int kMaxTasks = 8;   // Linears of one launch.

ISTHMUS_HOST_DEVICE constexpr int UnitInputs(WeightFormat format) {
  return format == WeightFormat::kFp8Block128 ? 128 : 64;
}
// Of the first words of a unit, of all that precedes the low parts, and of the unit.
ISTHMUS_HOST_DEVICE constexpr int UnitWordBytes(int tiles) { return tiles * kUnitSteps * 256; }
ISTHMUS_HOST_DEVICE constexpr int UnitHeadBytes(WeightFormat format, int tiles) {
  return UnitWordBytes(tiles) + (format == WeightFormat::kFp8Block128 ? tiles * 32 : 16);
}
ISTHMUS_HOST_DEVICE constexpr int UnitBytes(WeightFormat format, int tiles) {
  const bool has_low = format != WeightFormat::kFp8Block128;
  return UnitHeadBytes(format, tiles) + (has_low ? UnitWordBytes(tiles) : 0);
}
// Index of word h of `lane` at a step, of a token in `tile`.
ISTHMUS_HOST_DEVICE constexpr int WordInUnit(int tiles, int step, int tile, int lane, int h) {
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
