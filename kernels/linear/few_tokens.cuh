// SPDX-License-Identifier: Apache-2.0
// Tokens that a warp packs itself, in the registers that mma.sync takes them from, and multiplies
// with a group of the weights of 16 outputs: four k steps, 128 inputs of fp8 or 64 of bf16.
#pragma once

#include "kernels/linear/linear_stream.cuh"

namespace isthmus::kernels {

// What a lane knows of a group's tokens before they are packed: the inputs of its words.
template <Product kProduct>
struct RawTokens {
  static constexpr int kRun = UnitInputs(kProduct) / kWarpLanes;
  float value[kUnitSteps][2][kRun];

  // `x` is the row of token lane / 4; null: zeros.
  // is_aligned: runs of four inputs are 16 aligned bytes, and end with K.
  __device__ __forceinline__ void Load(const float* x, int cols, bool is_aligned, int group,
                                       int lane) {
    constexpr int kInputs = UnitInputs(kProduct);
    const int first = group * kInputs + lane % 4 * kRun;
    const bool is_whole = is_aligned && (group + 1) * kInputs <= cols;
#pragma unroll
    for (int i = 0; i < kUnitSteps * 2; ++i) {
      float(&run)[kRun] = value[i / 2][i % 2];
      const int k = first + i * (kInputs / (kUnitSteps * 2));
#pragma unroll
      for (int j = 0; j < kRun; ++j) run[j] = 0.0f;
      if (x == nullptr) continue;
      if (!is_whole) {
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
          if (k + j < cols) run[j] = x[k + j];
        }
      } else if constexpr (kRun == 4) {
        const float4 four = *reinterpret_cast<const float4*>(x + k);
        run[0] = four.x;
        run[1] = four.y;
        run[2] = four.z;
        run[3] = four.w;
      } else {
        const float2 two = *reinterpret_cast<const float2*>(x + k);
        run[0] = two.x;
        run[1] = two.y;
      }
    }
  }
  // The largest magnitude of the token in the group, at least `floor`; passes over NaN.
  __device__ __forceinline__ float Largest(float floor) const {
    float amax = floor;
#pragma unroll
    for (int i = 0; i < kUnitSteps * 2 * kRun; ++i) {
      amax = fmaxf(amax, fabsf(value[i / (2 * kRun)][i / kRun % 2][i % kRun]));
    }
    amax = fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 1));
    return fmaxf(amax, __shfl_xor_sync(kFullWarp, amax, 2));
  }
};

// A group's tokens as B operands.
template <Product kProduct>
struct PackedGroup {
  static constexpr int kParts = WeightFragment<kProduct>::kParts;
  uint32_t high[kUnitSteps][kParts][2];
  uint32_t low[HasLowParts(kProduct) ? kUnitSteps : 1][kParts][2];
  bool has_low;
  float even, odd;  // Scales of the tokens 2t and 2t + 1.

  __device__ __forceinline__ void Pack(const RawTokens<kProduct>& raw, int lane) {
    float scale = 1.0f;
    float inverse = 1.0f;
    if constexpr (kProduct == Product::kE4m3) {
      const int exponent = Fp8ScaleExponent(raw.Largest(0.0f));
      scale = PowerOfTwo(exponent);
      inverse = PowerOfTwo(-min(exponent, 127));  // 0 beside an infinite scale.
    } else if constexpr (kProduct == Product::kE4m3ByF16) {
      const int exponent = F16UnitExponent(raw.Largest(kF16AmaxFloor));
      scale = PowerOfTwo(exponent);
      inverse = PowerOfTwo(-exponent);
    }
    uint32_t low_bits = 0;
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kProduct == Product::kE4m3) {
          high[step][0][half] = E4m3Word(raw.value[step][half], inverse);
        } else if constexpr (kProduct == Product::kE4m3ByF16) {
          const uint4 words = SplitF16(raw.value[step][half], inverse);
          high[step][half][0] = words.x;
          high[step][half][1] = words.y;
          low[step][half][0] = words.z;
          low[step][half][1] = words.w;
          low_bits |= words.z | words.w;
        } else {
          const uint2 words = SplitBf16(raw.value[step][half]);
          high[step][0][half] = words.x;
          low[step][0][half] = words.y;
          low_bits |= words.y;
        }
      }
    }
    has_low = HasLowParts(kProduct) && __any_sync(kFullWarp, (low_bits & 0x7fff7fffu) != 0);
    even = odd = 1.0f;
    if constexpr (HasScales(kProduct)) {
      even = __shfl_sync(kFullWarp, scale, lane % 4 * 8);
      odd = __shfl_sync(kFullWarp, scale, lane % 4 * 8 + 4);
    }
  }
};

// total += the group's products with the weights at `tile`.
template <Product kProduct>
__device__ __forceinline__ void AddGroup(const unsigned char* tile, int steps, int lane,
                                         const PackedGroup<kProduct>& tokens, float weight_scale,
                                         float (&total)[4]) {
  // Mostly without a branch among the loads of a whole group, and with two chains of products where
  // registers last: a warp has little else to do while it waits for either.
  constexpr bool kTwoChains = kProduct != Product::kE4m3ByF16;
  float acc[4] = {};
  float more[4] = {};
  if (kTwoChains && steps == kUnitSteps && !tokens.has_low) {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      WeightFragment<kProduct> weight;
      weight.Load(tile + step * kTileCodeBytes + lane * 16);
      MultiplyStep(step % 2 == 1 ? more : acc, weight, tokens.high[step]);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kUnitSteps; ++step) {
      if (step >= steps) break;
      WeightFragment<kProduct> weight;
      weight.Load(tile + step * kTileCodeBytes + lane * 16);
      MultiplyStep(acc, weight, tokens.high[step]);
      if constexpr (HasLowParts(kProduct)) {
        if (tokens.has_low) MultiplyStep(acc, weight, tokens.low[step]);
      }
    }
  }
  const float even = tokens.even * weight_scale;  // Powers of two: exact.
  const float odd = tokens.odd * weight_scale;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float sum = kTwoChains ? acc[c] + more[c] : acc[c];
    total[c] = fmaf(sum, c % 2 == 0 ? even : odd, total[c]);
  }
}

}  // namespace isthmus::kernels
