// SPDX-License-Identifier: Apache-2.0
// The part of CUDA's language and intrinsics that our kernels use, as C++ for the emulator. Only
// kernels/core/launch.cuh includes it.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/core/emulator/emulator.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// Blocks run one after another on a thread, or each on its own: one copy per thread is one per
// running block. Not poisoned; dynamic shared memory is.
#define __shared__ static thread_local

#define threadIdx (::isthmus::kernels::emulator::ThreadIndex())
#define blockIdx (::isthmus::kernels::emulator::BlockIndex())
#define blockDim (::isthmus::kernels::emulator::BlockShape())
#define gridDim (::isthmus::kernels::emulator::GridShape())

using dim3 = ::isthmus::kernels::emulator::Dim3;
using cudaStream_t = void*;

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- Barriers, fences, votes and shuffles

inline void __syncthreads() { ::isthmus::kernels::emulator::SyncBlock(); }
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  std::byte none{};
  ::isthmus::kernels::emulator::Exchange(mask, &none, 0, &none);
}
inline void __threadfence_block() {}
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
[[noreturn]] inline void __trap() { ::isthmus::kernels::emulator::Fail("__trap"); }
inline void __nanosleep(unsigned) { ::isthmus::kernels::emulator::Yield(); }

namespace isthmus::kernels::emulator {
template <typename T>
struct WarpValues {
  T of[32];
};
template <typename T>
WarpValues<T> Gather(unsigned mask, T mine) {
  WarpValues<T> all;
  Exchange(mask, &mine, sizeof(T), all.of);
  return all;
}
inline unsigned Vote(unsigned mask, bool mine) {
  const auto all = Gather<uint8_t>(mask, mine ? 1 : 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) bits |= unsigned{all.of[i]} << i;
  return bits;
}
}  // namespace isthmus::kernels::emulator

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::isthmus::kernels::emulator::Vote(mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
  return __ballot_sync(mask, predicate) == mask;
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const auto all = ::isthmus::kernels::emulator::Gather(mask, value);
  const int lane = ::isthmus::kernels::emulator::LaneIndex();
  return all.of[(lane & ~(width - 1)) | (source & (width - 1))];
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  const auto all = ::isthmus::kernels::emulator::Gather(mask, value);
  const int lane = ::isthmus::kernels::emulator::LaneIndex();
  const int other = lane ^ lanes;
  return all.of[(other & ~(width - 1)) == (lane & ~(width - 1)) ? other : lane];
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const auto all = ::isthmus::kernels::emulator::Gather(mask, value);
  const int lane = ::isthmus::kernels::emulator::LaneIndex();
  const int other = lane - static_cast<int>(delta);
  return all.of[other >= (lane & ~(width - 1)) ? other : lane];
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const auto all = ::isthmus::kernels::emulator::Gather(mask, value);
  const int lane = ::isthmus::kernels::emulator::LaneIndex();
  const int other = lane + static_cast<int>(delta);
  return all.of[other <= (lane | (width - 1)) ? other : lane];
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  const auto all = ::isthmus::kernels::emulator::Gather(mask, value);
  unsigned bits = 0;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) != 0 && all.of[i] == value) bits |= 1u << i;
  }
  return bits;
}
namespace isthmus::kernels::emulator {
template <typename T, typename Fold>
T Reduce(unsigned mask, T value, Fold fold) {
  const auto all = Gather(mask, value);
  T out = value;
  for (unsigned i = 0; i < 32; ++i) {
    if ((mask >> i & 1u) != 0 && static_cast<int>(i) != LaneIndex()) out = fold(out, all.of[i]);
  }
  return out;
}
}  // namespace isthmus::kernels::emulator
template <typename T>
T __reduce_max_sync(unsigned mask, T value) {
  return ::isthmus::kernels::emulator::Reduce(mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
T __reduce_min_sync(unsigned mask, T value) {
  return ::isthmus::kernels::emulator::Reduce(mask, value, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
T __reduce_add_sync(unsigned mask, T value) {
  return ::isthmus::kernels::emulator::Reduce(mask, value,
                                              [](T a, T b) { return static_cast<T>(a + b); });
}

// ---- Atomics on global and shared memory

template <typename T>
T atomicAdd(T* p, T value) {
  return std::atomic_ref<T>(*p).fetch_add(value);
}
template <typename T>
T atomicSub(T* p, T value) {
  return std::atomic_ref<T>(*p).fetch_sub(value);
}
template <typename T>
T atomicOr(T* p, T value) {
  return std::atomic_ref<T>(*p).fetch_or(value);
}
template <typename T>
T atomicExch(T* p, T value) {
  return std::atomic_ref<T>(*p).exchange(value);
}
template <typename T>
T atomicCAS(T* p, T expected, T value) {
  std::atomic_ref<T>(*p).compare_exchange_strong(expected, value);
  return expected;
}
template <typename T>
T atomicMax(T* p, T value) {
  std::atomic_ref<T> ref(*p);
  T before = ref.load();
  while (before < value && !ref.compare_exchange_weak(before, value)) {
  }
  return before;
}
template <typename T>
T atomicMin(T* p, T value) {
  std::atomic_ref<T> ref(*p);
  T before = ref.load();
  while (value < before && !ref.compare_exchange_weak(before, value)) {
  }
  return before;
}
// Counts up to `limit` and then starts again at 0.
inline unsigned atomicInc(unsigned* p, unsigned limit) {
  std::atomic_ref<unsigned> ref(*p);
  unsigned before = ref.load();
  while (!ref.compare_exchange_weak(before, before >= limit ? 0 : before + 1)) {
  }
  return before;
}

// ---- Loads with cache hints

template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
T __ldcs(const T* p) {
  return *p;
}
template <typename T>
void __stcs(T* p, T value) {
  *p = value;
}
template <typename T>
void __stcg(T* p, T value) {
  *p = value;
}

// ---- Bits and arithmetic

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __float2int_rn(float x) { return static_cast<int>(std::nearbyint(x)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t{b} << 32 | a;
  unsigned out = 0;
  for (unsigned i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> (4 * i) & 15u;
    auto byte = static_cast<unsigned>(both >> (8 * (nibble & 7u)) & 0xffu);
    if ((nibble & 8u) != 0) byte = (byte & 0x80u) != 0 ? 0xffu : 0u;
    out |= byte << (8 * i);
  }
  return out;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31u));
}

using std::isinf;
using std::isnan;
using std::max;
using std::min;
