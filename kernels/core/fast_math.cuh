// SPDX-License-Identifier: Apache-2.0
// Approximations of the hardware, for patches alone: their bits are not those of math.h.
#pragma once

#include <cmath>

#include "kernels/core/launch.cuh"

namespace isthmus::kernels {

// 2^x within 2 ulp; 0 below -126.
__device__ __forceinline__ float FastExp2(float x) {
#if ISTHMUS_EMULATED
  return x < -126.0f ? 0.0f : std::exp2(x);
#else
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#endif
}

// 1 / x within 1 ulp; for numbers below 2^-126, infinity.
__device__ __forceinline__ float FastReciprocal(float x) {
#if ISTHMUS_EMULATED
  return 1.0f / x;
#else
  float out;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
#endif
}

}  // namespace isthmus::kernels
