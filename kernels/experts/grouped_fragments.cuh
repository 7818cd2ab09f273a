// SPDX-License-Identifier: Apache-2.0
// What the tensor cores read in the products of experts.grouped_w4a8: fragments of weights and of
// rows, and one group of 128 inputs multiplied (grouped_products.cuh).
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; s k32 step of a tile; nb block of eight rows.
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/core/sm120/block_scaled_mma.cuh"
#include "kernels/core/weight.h"

namespace isthmus::kernels::grouped {

// Four fp4 codes in the low (high) nibbles of the bytes of `word` as e4m3 of 2^-6 their value.
__device__ __forceinline__ uint32_t LowCodes(uint32_t word) {
  return (word << 4 & 0x80808080u) | (word << 2 & 0x1c1c1c1cu);
}
__device__ __forceinline__ uint32_t HighCodes(uint32_t word) {
  return (word & 0x80808080u) | (word >> 2 & 0x1c1c1c1cu);
}
// Byte `i` of a word of ue8m0 scales; 2^-127 counts as 0, NaN as infinity.
__device__ __forceinline__ float ScaleInWord(uint32_t word, int i) {
  const int shift = 23 - 8 * i;
  return __uint_as_float((shift >= 0 ? word << shift : word >> -shift) & 0x7f800000u);
}
// The same of e4m3 scales, which have no sign.
__device__ __forceinline__ float E4m3InWord(uint32_t word, int i) {
  const int shift = 20 - 8 * i;
  return __uint_as_float((shift >= 0 ? word << shift : word >> -shift) & 0x07f00000u) * 0x1p120f;
}

// The rows of a unit that this lane multiplies: row g of every eight. Rows beyond the last repeat
// it, and nobody stores them.
template <int kBlocks>
struct RowPlaces {
  const uint8_t* codes;          // [rows, inputs], e4m3 or f16
  const float* scales;           // [rows, inputs / kGroup]
  uint32_t first_code[kBlocks];  // The row's first, and 16 t: 1 / 128 of it is its scale.

  __device__ __forceinline__ float Scale(int nb, int group) const {
    return scales[(first_code[nb] >> 7) + static_cast<uint32_t>(group)];
  }
};

// One group of the rows as B fragments. A single block is loaded ahead of the weights; of more,
// each tile or k32 step when it is due, since registers are scarce.
template <int kBlocks>
struct GroupRows {
  static constexpr bool kAhead = kBlocks == 1;
  static constexpr bool kByTile = kBlocks <= 2;
  uint32_t words[kBlocks][kAhead ? 2 : 1][kByTile ? 4 : 2];

  __device__ __forceinline__ void LoadTile(const RowPlaces<kBlocks>& places, int group, int tile) {
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      const auto offset = static_cast<uint32_t>(group * 128 + tile * 64);
      const uint4 v =
          *reinterpret_cast<const uint4*>(places.codes + (places.first_code[nb] + offset));
      uint32_t* to = words[nb][kAhead ? tile : 0];
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    }
  }
  __device__ __forceinline__ void LoadStep(const RowPlaces<kBlocks>& places, int group, int tile,
                                           int s) {
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      const auto offset = static_cast<uint32_t>(group * 128 + tile * 64 + s * 8);
      const uint2 v =
          *reinterpret_cast<const uint2*>(places.codes + (places.first_code[nb] + offset));
      words[nb][0][0] = v.x;
      words[nb][0][1] = v.y;
    }
  }
  // Before the weights of the group.
  __device__ __forceinline__ void LoadAhead(const RowPlaces<kBlocks>& places, int group) {
    if constexpr (kAhead) {
      LoadTile(places, group, 0);
      LoadTile(places, group, 1);
    }
  }
  // Before step s of tile `tile`.
  __device__ __forceinline__ void LoadDue(const RowPlaces<kBlocks>& places, int group, int tile,
                                          int s) {
    if constexpr (!kByTile) {
      LoadStep(places, group, tile, s);
    } else if constexpr (!kAhead) {
      if (s == 0) LoadTile(places, group, tile);
    }
  }
  __device__ __forceinline__ void Fragment(int nb, int tile, int s, uint32_t (&b)[2]) const {
    const uint32_t* from = words[nb][kAhead ? tile : 0] + (kByTile ? 2 * s : 0);
    b[0] = from[0];
    b[1] = from[1];
  }
};

// sums[nb] += weights of one group (two k64 tiles) times rows; fp4.
template <WeightFormat kFormat, int kBlocks>
__device__ __forceinline__ void MultiplyFp4Group(const unsigned char* tiles,
                                                 const RowPlaces<kBlocks>& places, int group,
                                                 GroupRows<kBlocks>& rows,
                                                 float (&sums)[kBlocks][4]) {
  constexpr int kTile = kFormat == WeightFormat::kMxfp4 ? 544 : 576;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    const unsigned char* at = tiles + tile * kTile;
    const uint4 codes = *reinterpret_cast<const uint4*>(at + 16 * lane);
    uint2 scales;
    if constexpr (kFormat == WeightFormat::kMxfp4) {
      scales.x = *reinterpret_cast<const uint32_t*>(at + 512 + 4 * (lane / 4));
      scales.y = 0;
    } else {
      scales = *reinterpret_cast<const uint2*>(at + 512 + 8 * (lane / 4));
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      rows.LoadDue(places, group, tile, s);
      const uint32_t low = s == 0 ? codes.x : codes.z;
      const uint32_t high = s == 0 ? codes.y : codes.w;
      const uint32_t a[4] = {LowCodes(low), HighCodes(low), LowCodes(high), HighCodes(high)};
#pragma unroll
      for (int nb = 0; nb < kBlocks; ++nb) {
        uint32_t b[2];
        rows.Fragment(nb, tile, s, b);
        float c[4];
        if constexpr (kFormat == WeightFormat::kMxfp4) {
          MultiplyE4m3(c, a, b);
          for (int i = 0; i < 4; ++i) {
            sums[nb][i] = fmaf(c[i], ScaleInWord(scales.x, s + (i >= 2 ? 2 : 0)), sums[nb][i]);
          }
        } else {  // A scale for every 16 inputs: half of the operand is zero
                  // each time.
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t b16[2] = {half == 0 ? b[0] : 0u, half == 0 ? 0u : b[1]};
            MultiplyE4m3(c, a, b16);
            for (int i = 0; i < 4; ++i) {
              const float scale = E4m3InWord(i >= 2 ? scales.y : scales.x, 2 * s + half);
              sums[nb][i] = fmaf(c[i], scale, sums[nb][i]);
            }
          }
        }
      }
    }
  }
}

// The same of fp8: four k32 tiles.
template <int kBlocks>
__device__ __forceinline__ void MultiplyFp8Group(const unsigned char* tiles,
                                                 const RowPlaces<kBlocks>& places, int group,
                                                 GroupRows<kBlocks>& rows,
                                                 float (&sums)[kBlocks][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
    rows.LoadDue(places, group, tile / 2, tile % 2);
    const uint4 codes = *reinterpret_cast<const uint4*>(tiles + tile * 512 + 16 * lane);
    const uint32_t a[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      uint32_t b[2];
      rows.Fragment(nb, tile / 2, tile % 2, b);
      float c[4];
      MultiplyE4m3(c, a, b);
      for (int i = 0; i < 4; ++i) sums[nb][i] += c[i];
    }
  }
}

// The same of rows that are f16: four k32 steps.
template <int kBlocks>
struct HalfRows {
  static constexpr bool kAhead = kBlocks == 1;
  uint32_t words[kBlocks][kAhead ? 4 : 1][4];

  __device__ __forceinline__ void Load(const RowPlaces<kBlocks>& places, int group, int step) {
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      // One address for all steps: the rest of it is the same for all lanes.
      const uint8_t* codes =
          places.codes + 2 * uint64_t{places.first_code[nb] + static_cast<uint32_t>(group * 128)};
      const uint4 v = *reinterpret_cast<const uint4*>(codes + (step / 2 * 128 + step % 2 * 16));
      uint32_t* to = words[nb][kAhead ? step : 0];
      to[0] = v.x;
      to[1] = v.y;
      to[2] = v.z;
      to[3] = v.w;
    }
  }
  __device__ __forceinline__ void LoadAhead(const RowPlaces<kBlocks>& places, int group) {
    if constexpr (kAhead) {
#pragma unroll
      for (int step = 0; step < 4; ++step) Load(places, group, step);
    }
  }
  __device__ __forceinline__ void LoadDue(const RowPlaces<kBlocks>& places, int group, int step) {
    if constexpr (!kAhead) Load(places, group, step);
  }
};

// The values of half `s` of a word of e4m3 scales.
__device__ __forceinline__ void F32OfE4m3(uint32_t word, int s, float (&values)[2]) {
  uint32_t low, high;
  F16PairsOfE4m3(word, low, high);
  F32OfF16Pair(s == 0 ? low : high, values[0], values[1]);
}

// Four e4m3 codes each of row g and row g + 8 as the A fragment of a k16 step, whose inputs are
// taken in the order in which they lie.
__device__ __forceinline__ void HalfFragment(uint32_t row_g, uint32_t row_g8, uint32_t (&a)[4]) {
  F16PairsOfE4m3(row_g, a[0], a[2]);
  F16PairsOfE4m3(row_g8, a[1], a[3]);
}

// The eight codes of a word of kMmaTilesF16 as the same, as f16 of 2^-14 their values. The factors
// of the last two are two shifts each, one for the sign and one for the rest: what else they move
// does not reach the bits that are kept.
__device__ __forceinline__ void HalfFragmentOfFp4(uint32_t word, uint32_t (&a)[4]) {
  constexpr uint32_t kKept = 0x8e008e00u;
  a[0] = word & kKept;
  a[1] = word << 3 & kKept;
  a[2] = (word & 0x40384038u) * (1u << 1 | 1u << 6) & kKept;
  a[3] = (word & 0x20072007u) * (1u << 2 | 1u << 9) & kKept;
}

// sums[nb] += weights of one group times rows that are f16; any format.
template <WeightFormat kFormat, int kBlocks>
__device__ __forceinline__ void MultiplyHalfGroup(const unsigned char* tiles,
                                                  const RowPlaces<kBlocks>& places, int group,
                                                  HalfRows<kBlocks>& rows,
                                                  float (&sums)[kBlocks][4]) {
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  constexpr int kTile = kFormat == WeightFormat::kMxfp4 ? 544 : 576;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  uint4 codes = {};
  uint2 scales = {};
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int s = step % 2;
    uint32_t a[2][4];
    if constexpr (kIsFp8) {
      codes = *reinterpret_cast<const uint4*>(tiles + step * 512 + 16 * lane);
      HalfFragment(codes.x, codes.y, a[0]);
      HalfFragment(codes.z, codes.w, a[1]);
    } else {
      if (s == 0) {
        const unsigned char* at = tiles + step / 2 * kTile;
        codes = *reinterpret_cast<const uint4*>(at + 16 * lane);
        if constexpr (kFormat == WeightFormat::kMxfp4) {
          scales.x = *reinterpret_cast<const uint32_t*>(at + 512 + 4 * (lane / 4));
        } else {
          scales = *reinterpret_cast<const uint2*>(at + 512 + 8 * (lane / 4));
        }
      }
      const uint32_t low = s == 0 ? codes.x : codes.z;
      const uint32_t high = s == 0 ? codes.y : codes.w;
      HalfFragmentOfFp4(low, a[0]);
      HalfFragmentOfFp4(high, a[1]);
    }
    float scales16[2][2] = {};  // Of row g and of row g + 8.
    if constexpr (kFormat == WeightFormat::kNvfp4) {
      F32OfE4m3(scales.x, s, scales16[0]);
      F32OfE4m3(scales.y, s, scales16[1]);
    }
    rows.LoadDue(places, group, step);
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      const uint32_t* words = rows.words[nb][HalfRows<kBlocks>::kAhead ? step : 0];
      const uint32_t b[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
      float c[4];
      if constexpr (kIsFp8) {
        MmaF16(sums[nb], a[0], b[0]);
        MmaF16(sums[nb], a[1], b[1]);
      } else if constexpr (kFormat == WeightFormat::kMxfp4) {
        MultiplyF16(c, a[0], b[0]);
        MmaF16(c, a[1], b[1]);
        for (int i = 0; i < 4; ++i) {
          sums[nb][i] = fmaf(c[i], ScaleInWord(scales.x, s + (i >= 2 ? 2 : 0)), sums[nb][i]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          MultiplyF16(c, a[half], b[half]);
          for (int i = 0; i < 4; ++i) {
            sums[nb][i] = fmaf(c[i], scales16[i / 2][half], sums[nb][i]);
          }
        }
      }
    }
  }
}

// totals[nb] += weights of one group times rows with both scales applied by the tensor core of
// sm_120a. Lane t = 0 names the scale of row g, t = 1 that of row g + 8; row_scales: of row g of
// every block, as f32.
template <WeightFormat kFormat, int kBlocks>
__device__ __forceinline__ void MultiplyScaledGroup(const unsigned char* tiles,
                                                    const RowPlaces<kBlocks>& places, int group,
                                                    GroupRows<kBlocks>& rows, uint32_t weight_scale,
                                                    const float (&row_scales)[kBlocks],
                                                    float (&totals)[kBlocks][4]) {
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  constexpr Element8 kElement = kIsFp8 ? Element8::kE4m3 : Element8::kE2m1;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  uint4 codes = {};
  uint32_t scales = weight_scale;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int tile = step / 2;
    const int s = step % 2;
    uint32_t a[4];
    if constexpr (kIsFp8) {
      codes = *reinterpret_cast<const uint4*>(tiles + step * 512 + 16 * lane);
      a[0] = codes.x, a[1] = codes.y, a[2] = codes.z, a[3] = codes.w;
    } else {
      const unsigned char* at = tiles + tile * 544;
      if (s == 0) {
        codes = *reinterpret_cast<const uint4*>(at + 16 * lane);
        scales = *reinterpret_cast<const uint32_t*>(at + 512 + 4 * (lane / 4)) >> (16 * (lane % 2));
      } else {
        scales >>= 8;
      }
      SplitFp4ForMxf8(s == 0 ? codes.x : codes.z, a[0], a[1]);
      SplitFp4ForMxf8(s == 0 ? codes.y : codes.w, a[2], a[3]);
    }
    rows.LoadDue(places, group, tile, s);
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) {
      uint32_t b[2];
      rows.Fragment(nb, tile, s, b);
      // The exponent of a power of two is its ue8m0 byte.
      MmaMxf8f6f4<kElement, Element8::kE4m3>(totals[nb], a, b, scales & 0xffu,
                                             __float_as_uint(row_scales[nb]) >> 23);
    }
  }
}

}  // namespace isthmus::kernels::grouped
