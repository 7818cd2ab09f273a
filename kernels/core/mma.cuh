// SPDX-License-Identifier: Apache-2.0
// The tensor-core instructions that sm_90 and sm_120 share, and ldmatrix. One wrapper an
// instruction, its emulation beside it. Fragments as in the PTX manual, with g = lane / 4 and
// t = lane % 4:
//
//   c (m16n8): c[0], c[1] = C[g][2t], C[g][2t + 1]; c[2], c[3] = C[g + 8][2t], C[g + 8][2t + 1]
//   16-bit operands, k16: a[0] = A[g][2t, 2t + 1], a[1] = A[g + 8][2t..], a[2] = A[g][2t + 8..],
//                         a[3] = A[g + 8][2t + 8..]; b[0] = B[2t, 2t + 1][g], b[1] = B[2t + 8..][g]
//   8-bit operands, k32:  the same with four elements a register: k = 4t.. and 4t + 16..
//   tf32, k8:             one element a register: k = t and t + 4
//
// The order in which the hardware adds the products of one instruction is not documented; the
// emulator adds them in f64 and rounds once.
#pragma once

#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"

namespace isthmus::kernels {

#if ISTHMUS_EMULATED
namespace emulator {

inline float Half16Value(uint16_t bits, bool is_bf16) {
  if (is_bf16) return Bf16Value(bits);
  const uint32_t sign = uint32_t{bits} & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffu;
  float value = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  if (magnitude >= 0x7c00u) value = std::bit_cast<float>(0x7f800000u | (magnitude & 0x3ffu) << 13);
  return sign != 0 ? -value : value;
}

// c += A B over fragments whose element `i` of a register is element(word, i).
template <int kPerWord, typename Element>
void EmulateMma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Element element) {
  struct Words {
    uint32_t a[4];
    uint32_t b[2];
  };
  const Words mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const auto all = Gather(kFullWarp, mine);
  const int g = LaneIndex() / 4;
  const int t = LaneIndex() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i >= 2 ? 8 : 0);
    const int column = 2 * t + i % 2;
    double sum = c[i];
    for (int half = 0; half < 2; ++half) {
      for (int s = 0; s < 4; ++s) {
        const uint32_t from_a = all.of[(row % 8) * 4 + s].a[2 * half + row / 8];
        const uint32_t from_b = all.of[column * 4 + s].b[half];
        for (int e = 0; e < kPerWord; ++e) sum += element(from_a, e) * element(from_b, e);
      }
    }
    c[i] = static_cast<float>(sum);
  }
}

}  // namespace emulator
#endif

// c += a b, m16n8k16, bf16 operands, f32 sums.
__device__ __forceinline__ void MmaBf16(float (&c)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  emulator::EmulateMma<2>(c, a, b, [](uint32_t word, int e) {
    return double{Bf16Value(static_cast<uint16_t>(word >> (16 * e)))};
  });
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// c += a b, m16n8k16, f16 operands, f32 sums.
__device__ __forceinline__ void MmaF16(float (&c)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  emulator::EmulateMma<2>(c, a, b, [](uint32_t word, int e) {
    return double{emulator::Half16Value(static_cast<uint16_t>(word >> (16 * e)), false)};
  });
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// c = a b, m16n8k16, f16 operands, f32 sums.
__device__ __forceinline__ void MultiplyF16(float (&c)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  for (float& value : c) value = 0.0f;
  MmaF16(c, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#endif
}

// c += a b, m16n8k32, e4m3 operands, f32 sums.
__device__ __forceinline__ void MmaE4m3(float (&c)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  emulator::EmulateMma<4>(c, a, b, [](uint32_t word, int e) {
    return double{Fp8E4m3Value(static_cast<uint8_t>(word >> (8 * e)))};
  });
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// c = a b, m16n8k32, e4m3 operands: what a scale is still to be applied to. The hardware keeps
// fewer bits than f32 of such a sum.
__device__ __forceinline__ void MultiplyE4m3(float (&c)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  for (float& value : c) value = 0.0f;
  MmaE4m3(c, a, b);
#else
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
#endif
}

// c += a b, m16n8k8, tf32 operands (f32 bits, the low 13 ignored), f32 sums.
__device__ __forceinline__ void MmaTf32(float (&c)[4], const uint32_t (&a)[4],
                                        const uint32_t (&b)[2]) {
#if ISTHMUS_EMULATED
  emulator::EmulateMma<1>(
      c, a, b, [](uint32_t word, int) { return double{std::bit_cast<float>(word & ~0x1fffu)}; });
#else
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
      "{%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#if !ISTHMUS_EMULATED
__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
#endif

// ldmatrix of kMatrices 8 x 8 matrices of 16-bit elements: lane 8 i + r names row r of matrix i (16
// aligned bytes of shared memory); word i is elements 2t, 2t + 1 of row g of matrix i. Transposed:
// elements g of rows 2t, 2t + 1. Lanes beyond 8 * kMatrices need a valid address, too.
template <int kMatrices, bool kTransposed>
__device__ __forceinline__ void LoadMatrix(uint32_t (&words)[kMatrices], const void* row) {
  static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4);
#if ISTHMUS_EMULATED
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) emulator::Fail("ldmatrix of a misaligned row");
  const auto all = emulator::Gather(kFullWarp, reinterpret_cast<const uint16_t*>(row));
  const int g = emulator::LaneIndex() / 4;
  const int t = emulator::LaneIndex() % 4;
  for (int i = 0; i < kMatrices; ++i) {
    const uint16_t low = kTransposed ? all.of[8 * i + 2 * t][g] : all.of[8 * i + g][2 * t];
    const uint16_t high = kTransposed ? all.of[8 * i + 2 * t + 1][g] : all.of[8 * i + g][2 * t + 1];
    words[i] = uint32_t{high} << 16 | low;
  }
  __syncwarp();
#else
  const uint32_t address = SharedAddress(row);
  if constexpr (kMatrices == 4 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2 && !kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (kMatrices == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(address)
                 : "memory");
  } else if constexpr (!kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(address)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(address)
                 : "memory");
  }
#endif
}

}  // namespace isthmus::kernels
