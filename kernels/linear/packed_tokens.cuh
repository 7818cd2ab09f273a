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

inline constexpr int kUnitSteps = 4;      // k steps of a unit: 512 bytes each of a row of tiles.
inline constexpr int kMaxTokenTiles = 8;  // 64 tokens.
inline constexpr int kMaxTasks = 8;       // Linears of one launch.

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
  int tiles;  // Of 8 tokens: 1, 2, 4 or 8.
};

// Word of e4m3 codes of inputs 4 lane .. + 3 of a unit, and the scale of the whole unit.
__device__ __forceinline__ uint32_t PackE4m3(const float* x, int64_t k, int64_t cols,
                                             float* scale) {
  float value[4];
  float amax = 0.0f;
  for (int i = 0; i < 4; ++i) {
    value[i] = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
    amax = fmaxf(amax, fabsf(value[i]));  // Passes over NaN.
  }
  const int exponent = Fp8ScaleExponent(WarpMax(amax));
  *scale = PowerOfTwo(exponent);
  const float inverse = 1.0f / *scale;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= uint32_t{Fp8E4m3Code(value[i] * inverse)} << (8 * i);
  return word;
}

// Words of inputs 2 lane, 2 lane + 1 of a unit: rounded to bf16, and what that leaves.
__device__ __forceinline__ uint2 PackBf16(const float* x, int64_t k, int64_t cols) {
  uint2 words = make_uint2(0, 0);
  for (int i = 0; i < 2; ++i) {
    const float value = x != nullptr && k + i < cols ? x[k + i] : 0.0f;
    const uint16_t high = Bf16Bits(value);
    const float rest = value - Bf16Value(high);
    const uint16_t low = fabsf(rest) < INFINITY ? Bf16Bits(rest) : uint16_t{0};
    words.x |= uint32_t{high} << (16 * i);
    words.y |= uint32_t{low} << (16 * i);
  }
  return words;
}

inline constexpr int kPackWarps = 8;

// Grid: [units, inputs]. Block: kPackWarps warps, each of which packs a token at a time.
template <WeightFormat kFormat>
__global__ __launch_bounds__(kPackWarps* kWarpLanes) void PackTokens(
    const __grid_constant__ PackArgs args) {
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  __shared__ unsigned any_low;
  LetSuccessorStart();
  if (threadIdx.x == 0) any_low = 0;
  __syncthreads();
  WaitForPredecessor();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int tiles = args.tiles;
  const int64_t unit = blockIdx.x;
  uint8_t* out = args.units + (int64_t{blockIdx.y} * gridDim.x + unit) * UnitBytes(kFormat, tiles);
  auto* words = reinterpret_cast<uint32_t*>(out);
  auto* scales = reinterpret_cast<float*>(out + UnitWordBytes(tiles));
  auto* low_words = reinterpret_cast<uint32_t*>(out + UnitHeadBytes(kFormat, tiles));
  const int64_t k = unit * UnitInputs(kFormat) + lane * (UnitInputs(kFormat) / kWarpLanes);

  uint32_t low_bits = 0;
  for (int token = warp; token < 8 * tiles; token += kPackWarps) {
    const float* x =
        token < args.tokens ? args.x[blockIdx.y] + token * args.x_stride[blockIdx.y] : nullptr;
    const int place =
        WordInUnit(tiles, lane / 8, token / 8, token % 8 * 4 + lane % 4, lane % 8 / 4);
    if constexpr (kIsFp8) {
      float scale = 0.0f;
      words[place] = PackE4m3(x, k, args.cols, &scale);
      if (lane == 0) scales[token] = scale;
    } else {
      const uint2 both = PackBf16(x, k, args.cols);
      words[place] = both.x;
      low_words[place] = both.y;
      low_bits |= both.y & 0x7fff7fffu;
    }
  }
  if constexpr (!kIsFp8) {
    if (__any_sync(kFullWarp, low_bits != 0) && lane == 0) atomicOr(&any_low, 1u);
    __syncthreads();
    if (threadIdx.x == 0) {
      *reinterpret_cast<uint4*>(out + UnitWordBytes(tiles)) = {any_low, 0, 0, 0};
    }
  }
}

}  // namespace isthmus::kernels
