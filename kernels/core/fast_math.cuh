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

}  // namespace isthmus::kernels
