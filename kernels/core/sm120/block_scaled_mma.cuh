// SPDX-License-Identifier: Apache-2.0
// The block-scaled tensor-core instructions of sm_120a: (A * scale_A) (B * scale_B) + C in f32,
// with one scale for every run of K. No GPU of ours has them: what these wrappers do is tested over
// whole tiles in the emulator (block_scaled_mma_test.cu), and that they assemble by nvcc.
//
// Fragments as in mma.cuh (g = lane / 4, t = lane % 4). Elements:
//   mxf8f6f4, k32   one byte each; e2m1 codes stand in bits 5 to 2 of theirs. Word w of A: row g +
//   8
//                   (w mod 2), k = 16 (w / 2) + 4 t ...
//   mxf4nvf4, k64   nibbles, lowest k in the lowest; word w of A: row g + 8 (w mod 2), k = 32 (w /
//   2)
//                   + 8 t ...
// Scales (PTX, "Block Scaling for mma.sync"): for A the even lane of a pair of a quad holds row g,
// the odd one row g + 8; we use pair 0, so lanes with t = 0 and t = 1. For B lane t = 0 holds
// column g. Byte 0 is the scale of a k32 instruction; bytes 0 to 3 those of the four runs of 16 of
// a k64.
#pragma once

#include "kernels/core/mma.cuh"

namespace isthmus::kernels {

enum class Element8 : uint8_t { kE4m3, kE2m1 };

#if ISTHMUS_EMULATED
namespace emulator {

// e2m1 in bits 5 to 2 of a byte.
inline float ElementValue(Element8 kind, uint32_t byte) {
  if (kind == Element8::kE2m1) return Fp4E2m1Value(static_cast<uint8_t>(byte >> 2 & 15u));
  return Fp8E4m3Value(static_cast<uint8_t>(byte));
}

struct ScaledWords {
  uint32_t a[4];
  uint32_t b[2];
  uint32_t scale_a;
  uint32_t scale_b;
};

// kPerWord elements a word; kRuns runs of K, one scale each.
template <int kPerWord, int kRuns, typename A, typename B, typename Scale>
void EmulateScaledMma(float (&c)[4], const ScaledWords& mine, A a, B b, Scale scale) {
  const auto all = Gather(kFullWarp, mine);
  const int g = LaneIndex() / 4;
  const int t = LaneIndex() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = g + (i >= 2 ? 8 : 0);
    const int column = 2 * t + i % 2;
    double sum = c[i];
    for (int half = 0; half < 2; ++half) {
      for (int s = 0; s < 4; ++s) {
        const uint32_t from_a = all.of[row % 8 * 4 + s].a[2 * half + row / 8];
        const uint32_t from_b = all.of[column * 4 + s].b[half];
        for (int e = 0; e < kPerWord; ++e) {
          const int k = (half * 4 + s) * kPerWord + e;
          const int run = k * kRuns / (8 * kPerWord);
          const uint32_t scale_a = all.of[row % 8 * 4 + row / 8].scale_a >> (8 * run) & 0xffu;
          const uint32_t scale_b = all.of[column * 4].scale_b >> (8 * run) & 0xffu;
          sum += double{a(from_a, e)} * scale(scale_a) * b(from_b, e) * scale(scale_b);
        }
      }
    }
    c[i] = static_cast<float>(sum);
  }
}

}  // namespace emulator
#endif

// c += (a * scale_a)(b * scale_b), m16n8k32; scales ue8m0 in byte 0. kind::mxf8f6f4.
template <Element8 kA, Element8 kB>
__device__ __forceinline__ void MmaMxf8f6f4(float (&c)[4], const uint32_t (&a)[4],
                                            const uint32_t (&b)[2], uint32_t scale_a,
                                            uint32_t scale_b) {
#if ISTHMUS_EMULATED
  emulator::EmulateScaledMma<4, 1>(
      c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, scale_a, scale_b},
      [](uint32_t word, int e) { return emulator::ElementValue(kA, word >> (8 * e) & 0xffu); },
      [](uint32_t word, int e) { return emulator::ElementValue(kB, word >> (8 * e) & 0xffu); },
      [](uint32_t byte) { return double{Ue8m0Value(static_cast<uint8_t>(byte))}; });
#elif ISTHMUS_HAS_SM120A
  constexpr uint16_t kZero = 0;
#define ISTHMUS_MMA_MXF8F6F4(types)                                                           \
  asm volatile(                                                                               \
      "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32." types \
      ".f32.ue8m0 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, "   \
      "{%11}, {%12,%12};"                                                                     \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),       \
        "r"(scale_b), "h"(kZero))
  if constexpr (kA == Element8::kE4m3 && kB == Element8::kE4m3) {
    ISTHMUS_MMA_MXF8F6F4("e4m3.e4m3");
  } else if constexpr (kA == Element8::kE2m1 && kB == Element8::kE4m3) {
    ISTHMUS_MMA_MXF8F6F4("e2m1.e4m3");
  } else if constexpr (kA == Element8::kE4m3) {
    ISTHMUS_MMA_MXF8F6F4("e4m3.e2m1");
  } else {
    ISTHMUS_MMA_MXF8F6F4("e2m1.e2m1");
  }
#undef ISTHMUS_MMA_MXF8F6F4
#else
  (void)c, (void)a, (void)b, (void)scale_a, (void)scale_b;
  __trap();
#endif
}

// c += (a * scale_a)(b * scale_b), m16n8k64, e2m1 both; scales e4m3 (ue4m3: without sign), one for
// every 16 of K. kind::mxf4nvf4.
__device__ __forceinline__ void MmaNvfp4(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2], uint32_t scale_a,
                                         uint32_t scale_b) {
#if ISTHMUS_EMULATED
  const auto nibble = [](uint32_t word, int e) {
    return Fp4E2m1Value(static_cast<uint8_t>(word >> (4 * e) & 15u));
  };
  emulator::EmulateScaledMma<8, 4>(
      c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, scale_a, scale_b}, nibble, nibble,
      [](uint32_t byte) { return double{Fp8E4m3Value(static_cast<uint8_t>(byte & 0x7fu))}; });
#elif ISTHMUS_HAS_SM120A
  constexpr uint16_t kZero = 0;
  asm volatile(
      "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1"
      ".f32.ue4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%12,%12}, {%11}, "
      "{%12,%12};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "r"(scale_b), "h"(kZero));
#else
  (void)c, (void)a, (void)b, (void)scale_a, (void)scale_b;
  __trap();
#endif
}

// The eight codes of a word of weight_tiles.h as two words of e2m1 bytes for mxf8f6f4: `low` row g,
// `high` row g + 8.
__device__ __forceinline__ void SplitFp4ForMxf8(uint32_t word, uint32_t& low, uint32_t& high) {
  low = word << 2 & 0x3c3c3c3cu;
  high = word >> 2 & 0x3c3c3c3cu;
}

}  // namespace isthmus::kernels
