// SPDX-License-Identifier: Apache-2.0
// Index keys and queries as operands of mma.m16n8k16: keys on N, heads on M. A lane may take any 32
// channels of a key as long as the query is permuted alike, so it takes whole 16-byte pieces: what
// the tensor core sums over has no order.
//
// Letters: g = lane / 4 and t = lane % 4 as in mma.cuh, s step of 16 channels, b word of an
// operand, e half of a word, i tile of 8 keys.
#pragma once

#include "kernels/core/async_copy.cuh"
#include "kernels/core/formats.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"

namespace isthmus::kernels::mma_scores {

inline constexpr int kDim = 128;
inline constexpr int kSteps = kDim / 16;

template <EntryFormat kFormat>
inline constexpr int kKeyBytes = kFormat == EntryFormat::kKeyFp4   ? kDim / 2
                                 : kFormat == EntryFormat::kKeyFp8 ? kDim
                                                                   : 2 * kDim;
template <EntryFormat kFormat>
inline constexpr bool kHasScales = kFormat != EntryFormat::kKeyBf16;

// The channel that is half `e` of word `b` of lane t in step s.
template <EntryFormat kFormat>
__device__ __forceinline__ constexpr int ChannelOf(int t, int s, int b, int e) {
  // fp4: the 32 channels of one scale; a word of eight codes gives the pairs (n, n + 4).
  if (kFormat == EntryFormat::kKeyFp4) return 32 * t + 8 * (s / 2) + 2 * (s % 2) + b + 4 * e;
  // fp8: pieces t and t + 4. bf16: pieces t, t + 4, t + 8 and t + 12.
  if (kFormat == EntryFormat::kKeyFp8) return 64 * (s / 4) + 16 * t + 4 * (s % 4) + 2 * b + e;
  return 32 * (s / 2) + 8 * t + 4 * (s % 2) + 2 * b + e;
}

// Where piece `p` of key `r` of a tile lies in shared memory: keys of 128 bytes and more swap their
// halves in odd rows, so that eight lanes read eight different banks of 16 bytes.
template <EntryFormat kFormat>
__device__ __forceinline__ int PieceOffset(int r, int p) {
  const int place = kKeyBytes<kFormat> >= 128 ? p ^ (r % 2 * 4) : p;
  return r * kKeyBytes<kFormat> + 16 * place;
}

__device__ __forceinline__ uint4 SharedPiece(const unsigned char* p) {
  return *reinterpret_cast<const uint4*>(p);
}

// The larger of four ue8m0 codes.
__device__ __forceinline__ uint32_t LargestCode(uint32_t codes) {
  const uint32_t a = max(codes & 0xffu, codes >> 8 & 0xffu);
  const uint32_t b = max(codes >> 16 & 0xffu, codes >> 24);
  return max(a, b);
}

// Eight codes of fp4 as four pairs of f16, times the f16 pair `factor` * 2^-14.
__device__ __forceinline__ void WidenFp4(uint32_t codes, uint32_t factor, uint32_t (&pairs)[4]) {
  const uint32_t magnitude = 0x0e000e00u;
  const uint32_t sign = 0x80008000u;
  pairs[0] = (codes << 9 & magnitude) | (codes << 12 & sign);
  pairs[1] = (codes << 5 & magnitude) | (codes << 8 & sign);
  pairs[2] = (codes << 1 & magnitude) | (codes << 4 & sign);
  pairs[3] = (codes >> 3 & magnitude) | (codes & sign);
#pragma unroll
  for (int n = 0; n < 4; ++n) pairs[n] = MultiplyF16Pair(pairs[n], factor);
}

// The operands of key 8i + g, and nothing of its scale but, in fp4, the quotient of the lane's own
// and the largest: exact in f16 down to 2^-23, and zero below 2^-28.
template <EntryFormat kFormat>
__device__ __forceinline__ void LoadKey(const unsigned char* keys, const uint32_t* scales, int r,
                                        uint32_t (&operand)[kSteps][2]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
  if constexpr (kFormat == EntryFormat::kKeyFp4) {
    const uint4 piece = SharedPiece(keys + PieceOffset<kFormat>(r, t));
    const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
    const uint32_t below = LargestCode(scales[r]) - (scales[r] >> (8 * t) & 0xffu);
    const uint32_t factor = below < 29 ? (29 - below) << 10 : 0;  // 2^(14 - below)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t pairs[4];
      WidenFp4(words[j], factor | factor << 16, pairs);
#pragma unroll
      for (int n = 0; n < 4; ++n) operand[2 * j + n / 2][n % 2] = pairs[n];
    }
  } else if constexpr (kFormat == EntryFormat::kKeyFp8) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint4 piece = SharedPiece(keys + PieceOffset<kFormat>(r, t + 4 * c));
      const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        F16PairsOfE4m3(words[j], operand[4 * c + j][0], operand[4 * c + j][1]);
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint4 piece = SharedPiece(keys + PieceOffset<kFormat>(r, t + 4 * c));
      operand[2 * c][0] = piece.x;
      operand[2 * c][1] = piece.y;
      operand[2 * c + 1][0] = piece.z;
      operand[2 * c + 1][1] = piece.w;
    }
  }
}

// What the score of a key is still to be multiplied with.
template <EntryFormat kFormat>
__device__ __forceinline__ float KeyFactor(const uint32_t* scales, int r) {
  if constexpr (kFormat == EntryFormat::kKeyFp4) {
    return Ue8m0Value(static_cast<uint8_t>(LargestCode(scales[r])));
  } else if constexpr (kFormat == EntryFormat::kKeyFp8) {
    return __uint_as_float(scales[r]);
  } else {
    return 1.0f;
  }
}

template <EntryFormat kFormat>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
  if constexpr (kFormat == EntryFormat::kKeyBf16) {
    MmaBf16(c, a, b);
  } else {
    MmaF16(c, a, b);
  }
}

// The power of two that a head's channels are divided by, so that the largest lies in [2^14, 2^15):
// as far from f16's subnormal numbers as can be. bf16 has the range of f32 and needs none.
template <EntryFormat kFormat>
__device__ __forceinline__ int HeadExponent(float amax) {
  if constexpr (kFormat == EntryFormat::kKeyBf16) {
    return 0;
  } else {
    const int exponent = static_cast<int>(__float_as_uint(amax) >> 23 & 0xffu) - 127;
    return max(exponent, -112) - 14;
  }
}

template <EntryFormat kFormat>
__device__ __forceinline__ uint32_t QueryPair(float low, float high) {
  return kFormat == EntryFormat::kKeyBf16 ? Bf16Pair(low, high) : F16Pair(low, high);
}

}  // namespace isthmus::kernels::mma_scores
