// SPDX-License-Identifier: Apache-2.0
// KV entries of the cache in kernels: one value read, and one entry written by a warp, with the
// bits of DecodeKvEntry and EncodeKvEntry (kernels/core/quantise.h).
#pragma once

#include "kernels/core/device_batch.h"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"

namespace isthmus::kernels {

// Channel `d` of the entry at `data`, whose scales lie at `scale` (kKvFp8 only).
__device__ __forceinline__ float KvEntryValue(EntryFormat format, const std::byte* data,
                                              const std::byte* scale, int nope, int d) {
  if (format == EntryFormat::kKvF32) return reinterpret_cast<const float*>(data)[d];
  if (d >= nope) return Bf16Value(reinterpret_cast<const uint16_t*>(data + nope)[d - nope]);
  return Fp8E4m3Value(static_cast<uint8_t>(data[d])) *
         Ue8m0Value(static_cast<uint8_t>(scale[d / kKvNopeBlock]));
}

// The exponent of one block of kKvNopeBlock values, two in each lane. By all lanes of a warp.
__device__ __forceinline__ int KvBlockExponent(float x0, float x1) {
  return Fp8ScaleExponent(WarpMax(fmaxf(std::fabs(x0), std::fabs(x1))));
}

// The codes of two values of a block, the first in the low byte.
__device__ __forceinline__ uint16_t KvBlockCodes(float x0, float x1, int exponent) {
  const float inverse = 1.0f / PowerOfTwo(exponent);
  return static_cast<uint16_t>(Fp8E4m3Code(x0 * inverse) | uint32_t{Fp8E4m3Code(x1 * inverse)}
                                                               << 8);
}

// Block `block` of an fp8 entry, from its row of f32 values, by all lanes of a warp. The rotary
// part counts as the blocks behind the last fp8 block; its values are on the bf16 grid already.
__device__ __forceinline__ void EncodeKvBlock(const float* x, int nope, int block, std::byte* data,
                                              std::byte* scale) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int d = block * kKvNopeBlock + 2 * lane;
  const float x0 = x[d];
  const float x1 = x[d + 1];
  if (d >= nope) {
    reinterpret_cast<uint32_t*>(data + nope)[(d - nope) / 2] = Bf16Bits(x0) | uint32_t{Bf16Bits(x1)}
                                                                                  << 16;
    return;
  }
  const int exponent = KvBlockExponent(x0, x1);
  reinterpret_cast<uint16_t*>(data)[d / 2] = KvBlockCodes(x0, x1, exponent);
  if (lane == 0) scale[block] = static_cast<std::byte>(exponent + 127);
}

}  // namespace isthmus::kernels
