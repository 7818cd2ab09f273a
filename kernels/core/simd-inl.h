// SPDX-License-Identifier: Apache-2.0
// Vector building blocks of the CPU kernels, compiled once per SIMD target (Highway, included from
// a foreach_target source). Everything works on 16 named f32 lanes, which are one register on
// AVX-512 and two on AVX2, so that a kernel written with them gives the same bits on both
// (kernels/decisions/0001-summation-order.md):
//
//   * lane i of a sum over k holds the elements k = i (mod 16), added in ascending order by FMA;
//   * the 16 lanes are then folded by one fixed tree: +8, +4, +2, +1.
//
// A kernel adds `namespace hn = hwy::HWY_NAMESPACE` only for what is not here. Functions that take
// a count `n` accept any n >= 0; lanes past the end count as zero.

#if defined(ISTHMUS_KERNELS_CORE_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ISTHMUS_KERNELS_CORE_SIMD_INL_H_
#undef ISTHMUS_KERNELS_CORE_SIMD_INL_H_
#else
#define ISTHMUS_KERNELS_CORE_SIMD_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>

// Before a loop with a small constant bound over an array of vectors: unrolls it wholly, so that
// the array lives in registers.
#ifndef ISTHMUS_UNROLL
#ifdef __clang__
#define ISTHMUS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define ISTHMUS_UNROLL _Pragma("GCC unroll 16")
#endif
#endif

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::CappedTag<float, 16>;
using DI = hn::Rebind<int32_t, DF>;
using DU = hn::Rebind<uint32_t, DF>;
using VF = hn::Vec<DF>;
using VI = hn::Vec<DI>;
using VU = hn::Vec<DU>;

inline constexpr size_t kLanes = hn::MaxLanes(DF());
inline constexpr size_t kParts = 16 / kLanes;
static_assert(kLanes == 8 || kLanes == 16, "AVX2 or AVX-512: see the compiler floor");

// ---- Arithmetic on one register, whatever its width. Each operation is one IEEE f32 operation, so
// lanes do not depend on the target.

// Rounds to the bf16 grid, to nearest even; NaN becomes 0x7fc0 as in Bf16Bits.
HWY_INLINE VF RoundBf16V(VF x) {
  const DF d;
  const DU du;
  const VU bits = hn::BitCast(du, x);
  const VU odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
  const VU sum = hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
  const VF rounded = hn::BitCast(d, hn::And(sum, hn::Set(du, 0xffff0000u)));
  return hn::IfThenElse(hn::IsNaN(x), hn::BitCast(d, hn::Set(du, 0x7fc00000u)), rounded);
}

// e^x, lane by lane the bits of Exp in math.h; see there for the range.
HWY_INLINE VF ExpV(VF x) {
  const DF d;
  const DI di;
  const VF clamped = hn::Min(hn::Max(x, hn::Set(d, -105.0f)), hn::Set(d, 89.0f));
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
  const VF magic = hn::Set(d, 0x1.8p23f);
  const VF shifted = hn::MulAdd(clamped, hn::Set(d, 0x1.715476p+0f), magic);
  const VF n = hn::Sub(shifted, magic);
  VF r = hn::MulAdd(n, hn::Set(d, -0x1.63p-1f), clamped);
  r = hn::MulAdd(n, hn::Set(d, 0x1.bd0106p-13f), r);
  VF p = hn::Set(d, 1.0f / 5040.0f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 720.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  // 2^n in two exact factors, so that only the last product rounds, into subnormals if need be.
  const VI whole = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, magic));
  const VI half = hn::ShiftRight<1>(whole);
  const VI bias = hn::Set(di, 127);
  const VF a = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
  const VF b = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(hn::Sub(whole, half), bias)));
  return hn::IfThenElse(hn::IsNaN(x), x, hn::Mul(hn::Mul(p, a), b));
}

// 1 / (1 + e^-x), the bits of Sigmoid in math.h.
HWY_INLINE VF SigmoidV(VF x) {
  const DF d;
  return hn::Div(hn::Set(d, 1.0f), hn::Add(hn::Set(d, 1.0f), ExpV(hn::Neg(x))));
}

// The e4m3 value nearest to x, saturating at 448: Fp8E4m3Value(Fp8E4m3Code(x)).
HWY_INLINE VF RoundE4m3V(VF x) {
  const DF d;
  const DU du;
  const VF a = hn::Abs(x);
  const VU bits = hn::BitCast(du, a);
  const VU odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
  const VU sum = hn::Add(hn::Add(bits, hn::Set(du, 0x7ffffu)), odd);
  VF y = hn::BitCast(d, hn::And(sum, hn::Set(du, 0xfff00000u)));
  const VF grid = hn::Set(d, 0x1.8p14f);
  y = hn::IfThenElse(hn::Lt(a, hn::Set(d, 0x1p-6f)), hn::Sub(hn::Add(a, grid), grid), y);
  const VF largest = hn::Set(d, 448.0f);
  y = hn::IfThenElse(hn::Ge(a, largest), largest, y);
  y = hn::IfThenElse(hn::IsNaN(x), hn::BitCast(d, hn::Set(du, 0x7fc00000u)), y);
  return hn::CopySign(y, x);
}

// Fp8E4m3Code per lane, in the low byte.
HWY_INLINE VU CodeE4m3V(VF x) {
  const DF d;
  const DU du;
  const VF a = hn::Abs(x);
  const VU bits = hn::BitCast(du, a);
  const VU odd = hn::And(hn::ShiftRight<20>(bits), hn::Set(du, 1u));
  const VU sum = hn::Add(hn::Add(bits, hn::Set(du, 0x7ffffu)), odd);
  VU code = hn::Sub(hn::ShiftRight<20>(sum), hn::Set(du, 120u << 3));
  const VF grid = hn::Set(d, 0x1.8p14f);
  const VU steps = hn::Sub(hn::BitCast(du, hn::Add(a, grid)), hn::BitCast(du, grid));
  code = hn::IfThenElse(hn::RebindMask(du, hn::Lt(a, hn::Set(d, 0x1p-6f))), steps, code);
  const VU largest = hn::Set(du, 0x7eu);
  code = hn::IfThenElse(hn::RebindMask(du, hn::Ge(a, hn::Set(d, 448.0f))), largest, code);
  code = hn::IfThenElse(hn::RebindMask(du, hn::IsNaN(x)), hn::Set(du, 0x7fu), code);
  const VU sign = hn::And(hn::ShiftRight<24>(hn::BitCast(du, x)), hn::Set(du, 0x80u));
  return hn::Or(code, sign);
}

// Fp4E2m1Code per lane, in the low four bits.
HWY_INLINE VU CodeE2m1V(VF x) {
  const DF d;
  const DI di;
  const DU du;
  const VF a = hn::Abs(x);
  // Every comparison that holds takes one from 7; NaN keeps 7, as in the scalar codec.
  VI code = hn::Set(di, 7);
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Le(a, hn::Set(d, 0.25f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Lt(a, hn::Set(d, 0.75f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Le(a, hn::Set(d, 1.25f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Lt(a, hn::Set(d, 1.75f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Le(a, hn::Set(d, 2.5f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Lt(a, hn::Set(d, 3.5f)))));
  code = hn::Add(code, hn::BitCast(di, hn::VecFromMask(d, hn::Le(a, hn::Set(d, 5.0f)))));
  const VU sign = hn::And(hn::ShiftRight<28>(hn::BitCast(du, x)), hn::Set(du, 8u));
  return hn::Or(hn::BitCast(du, code), sign);
}

// Values of fp4 codes, one per lane; bits above the low four are ignored.
HWY_INLINE VF ValueE2m1V(VU code) {
  const DF d;
  const DI di;
  const DU du;
  alignas(64) static constexpr float kMagnitudes[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f,
                                                        4.0f, 6.0f, 0.0f, 0.5f, 1.0f, 1.5f,
                                                        2.0f, 3.0f, 4.0f, 6.0f};
  const VF table = hn::Load(d, kMagnitudes);
  const VI index = hn::BitCast(di, hn::And(code, hn::Set(du, 7u)));
  const VF magnitude = hn::TableLookupLanes(table, hn::IndicesFromVec(d, index));
  const VU sign = hn::And(hn::ShiftLeft<28>(code), hn::Set(du, 0x80000000u));
  return hn::Or(magnitude, hn::BitCast(d, sign));
}

// ---- Sixteen lanes.

struct F32x16 {
  VF v[kParts];
};

// f(0) and, with two registers, f(1).
template <class Function>
HWY_INLINE F32x16 Parts16(const Function& f) {
  if constexpr (kParts == 1) {
    return {{f(size_t{0})}};
  } else {
    return {{f(size_t{0}), f(size_t{1})}};
  }
}

// f(part of x, part of y, ...) for every register of the sixteen lanes.
template <class Function, class... Args>
HWY_INLINE F32x16 Map16(const Function& f, const Args&... args) {
  return Parts16([&](size_t part) HWY_ATTR { return f(args.v[part]...); });
}

HWY_INLINE F32x16 Set16(float x) {
  return Parts16([&](size_t) HWY_ATTR { return hn::Set(DF(), x); });
}
HWY_INLINE F32x16 Zero16() { return Set16(0.0f); }

HWY_INLINE F32x16 Load16(const float* p) {
  return Parts16([&](size_t part) HWY_ATTR { return hn::LoadU(DF(), p + part * kLanes); });
}
HWY_INLINE void Store16(const F32x16& x, float* p) {
  ISTHMUS_UNROLL
  for (size_t part = 0; part < kParts; ++part) hn::StoreU(x.v[part], DF(), p + part * kLanes);
}

// How many of the first n lanes lie in register `part`.
HWY_INLINE size_t LanesIn(size_t part, size_t n) {
  const size_t before = part * kLanes;
  return n <= before ? 0 : (n - before < kLanes ? n - before : kLanes);
}
// The first n <= 16 lanes from memory, the others zero; nothing beyond p[n - 1] is touched.
HWY_INLINE F32x16 LoadFirst16(const float* p, size_t n) {
  const DF d;
  return Parts16([&](size_t part) HWY_ATTR {
    return hn::MaskedLoad(hn::FirstN(d, LanesIn(part, n)), d, p + part * kLanes);
  });
}
HWY_INLINE void StoreFirst16(const F32x16& x, float* p, size_t n) {
  const DF d;
  ISTHMUS_UNROLL
  for (size_t part = 0; part < kParts; ++part) {
    hn::BlendedStore(x.v[part], hn::FirstN(d, LanesIn(part, n)), d, p + part * kLanes);
  }
}

HWY_INLINE F32x16 Add16(const F32x16& a, const F32x16& b) {
  return Map16([](VF x, VF y) HWY_ATTR { return hn::Add(x, y); }, a, b);
}
HWY_INLINE F32x16 Sub16(const F32x16& a, const F32x16& b) {
  return Map16([](VF x, VF y) HWY_ATTR { return hn::Sub(x, y); }, a, b);
}
HWY_INLINE F32x16 Mul16(const F32x16& a, const F32x16& b) {
  return Map16([](VF x, VF y) HWY_ATTR { return hn::Mul(x, y); }, a, b);
}
// a * b + c in one rounding.
HWY_INLINE F32x16 MulAdd16(const F32x16& a, const F32x16& b, const F32x16& c) {
  return Map16([](VF x, VF y, VF z) HWY_ATTR { return hn::MulAdd(x, y, z); }, a, b, c);
}
// The larger of each pair; a NaN in `a` is passed over, a NaN in `b` stays.
HWY_INLINE F32x16 Max16(const F32x16& a, const F32x16& b) {
  return Map16([](VF x, VF y) HWY_ATTR { return hn::Max(x, y); }, a, b);
}
HWY_INLINE F32x16 Min16(const F32x16& a, const F32x16& b) {
  return Map16([](VF x, VF y) HWY_ATTR { return hn::Min(x, y); }, a, b);
}
HWY_INLINE F32x16 Abs16(const F32x16& a) {
  return Map16([](VF x) HWY_ATTR { return hn::Abs(x); }, a);
}
HWY_INLINE F32x16 Exp16(const F32x16& a) {
  return Map16([](VF x) HWY_ATTR { return ExpV(x); }, a);
}
HWY_INLINE F32x16 Sigmoid16(const F32x16& a) {
  return Map16([](VF x) HWY_ATTR { return SigmoidV(x); }, a);
}
HWY_INLINE F32x16 RoundBf16x16(const F32x16& a) {
  return Map16([](VF x) HWY_ATTR { return RoundBf16V(x); }, a);
}

// Folds eight lanes to four to two to one.
template <class V8>
HWY_INLINE float Fold8(V8 v8) {
  const hn::FixedTag<float, 4> d4;
  const auto v4 = hn::Add(hn::LowerHalf(d4, v8), hn::UpperHalf(d4, v8));
  const auto v2 = hn::Add(v4, hn::Shuffle1032(v4));  // Lane i plus lane i + 2.
  return hn::GetLane(hn::Add(v2, hn::Shuffle2301(v2)));
}
// The fixed tree over the sixteen lanes.
template <class X16>
HWY_INLINE float Fold16(const X16& x) {
  if constexpr (kParts == 1) {
    const hn::FixedTag<float, 8> d8;
    return Fold8(hn::Add(hn::LowerHalf(d8, x.v[0]), hn::UpperHalf(d8, x.v[0])));
  } else {
    return Fold8(hn::Add(x.v[0], x.v[kParts - 1]));
  }
}
// Folds sums[i][j] into lane 4 i + j, by the same tree: each step halves all of them at once, the
// lower lanes of a sum first. For AVX-512.
template <class X16>
HWY_INLINE VF FoldTile16(const X16 (&sums)[4][4]) {
  static_assert(sizeof(X16) == sizeof(VF));
  const DF d;
  const hn::Repartition<double, DF> pairs;
  VF fours[4];  // Of key j, one block for each of the four i.
  ISTHMUS_UNROLL
  for (size_t j = 0; j < 4; ++j) {
    VF eights[2];  // Of i and i + 2, side by side.
    ISTHMUS_UNROLL
    for (size_t i = 0; i < 2; ++i) {
      const VF a = sums[i][j].v[0];
      const VF b = sums[i + 2][j].v[0];
      eights[i] = hn::Add(hn::ConcatLowerLower(d, b, a), hn::ConcatUpperUpper(d, b, a));
    }
    fours[j] = hn::Add(hn::OddEvenBlocks(hn::SwapAdjacentBlocks(eights[1]), eights[0]),
                       hn::OddEvenBlocks(eights[1], hn::SwapAdjacentBlocks(eights[0])));
  }
  VF twos[2];  // Of j and j + 2.
  ISTHMUS_UNROLL
  for (size_t j = 0; j < 2; ++j) {
    const auto a = hn::BitCast(pairs, fours[j]);
    const auto b = hn::BitCast(pairs, fours[j + 2]);
    twos[j] = hn::Add(hn::BitCast(d, hn::InterleaveLower(pairs, a, b)),
                      hn::BitCast(d, hn::InterleaveUpper(pairs, a, b)));
  }
  return hn::Add(hn::OddEven(hn::Reverse2(d, twos[1]), twos[0]),
                 hn::OddEven(twos[1], hn::Reverse2(d, twos[0])));
}
// The largest of the sixteen lanes; for magnitudes, where order and sign of zero cannot matter.
HWY_INLINE float FoldMax16(const F32x16& x) {
  return hn::GetLane(hn::MaxOfLanes(DF(), hn::Max(x.v[0], x.v[kParts - 1])));
}

// ---- Rows of memory.

// Dot products of kA rows with kB rows, out[i * kB + j] = a[i] . b[j]. The bits of each do not
// depend on the tile. A 4 x 4 tile fills AVX-512; 2 x 3 suits AVX2.
template <size_t kA, size_t kB>
HWY_INLINE void DotTile16(const float* const* a, const float* const* b, size_t n, float* out) {
  F32x16 sum[kA][kB];
  ISTHMUS_UNROLL
  for (size_t i = 0; i < kA; ++i) {
    ISTHMUS_UNROLL
    for (size_t j = 0; j < kB; ++j) sum[i][j] = Zero16();
  }
  size_t k = 0;
  for (; k + 16 <= n; k += 16) {
    F32x16 column[kB];
    ISTHMUS_UNROLL
    for (size_t j = 0; j < kB; ++j) column[j] = Load16(b[j] + k);
    ISTHMUS_UNROLL
    for (size_t i = 0; i < kA; ++i) {
      const F32x16 row = Load16(a[i] + k);
      ISTHMUS_UNROLL
      for (size_t j = 0; j < kB; ++j) sum[i][j] = MulAdd16(row, column[j], sum[i][j]);
    }
  }
  if (k < n) {
    ISTHMUS_UNROLL
    for (size_t i = 0; i < kA; ++i) {
      const F32x16 row = LoadFirst16(a[i] + k, n - k);
      ISTHMUS_UNROLL
      for (size_t j = 0; j < kB; ++j) {
        sum[i][j] = MulAdd16(row, LoadFirst16(b[j] + k, n - k), sum[i][j]);
      }
    }
  }
  if constexpr (kParts == 1 && kA == 4 && kB == 4) {
    hn::StoreU(FoldTile16(sum), DF(), out);
  } else {
    ISTHMUS_UNROLL
    for (size_t i = 0; i < kA; ++i) {
      ISTHMUS_UNROLL
      for (size_t j = 0; j < kB; ++j) out[i * kB + j] = Fold16(sum[i][j]);
    }
  }
}

HWY_INLINE float Dot16(const float* a, const float* b, size_t n) {
  float out = 0;
  DotTile16<1, 1>(&a, &b, n, &out);
  return out;
}

HWY_INLINE float Sum16(const float* x, size_t n) {
  F32x16 sum = Zero16();
  size_t k = 0;
  for (; k + 16 <= n; k += 16) sum = Add16(sum, Load16(x + k));
  if (k < n) sum = Add16(sum, LoadFirst16(x + k, n - k));
  return Fold16(sum);
}

// The largest |x[k]|; NaN is passed over; 0 for n = 0.
HWY_INLINE float MaxAbs16(const float* x, size_t n) {
  F32x16 largest = Zero16();
  size_t k = 0;
  for (; k + 16 <= n; k += 16) largest = Max16(Abs16(Load16(x + k)), largest);
  if (k < n) largest = Max16(Abs16(LoadFirst16(x + k, n - k)), largest);
  return FoldMax16(largest);
}

// y[k] = fma(a, x[k], y[k]).
HWY_INLINE void Axpy16(float a, const float* x, size_t n, float* y) {
  const F32x16 factor = Set16(a);
  size_t k = 0;
  for (; k + 16 <= n; k += 16) Store16(MulAdd16(factor, Load16(x + k), Load16(y + k)), y + k);
  if (k < n) {
    const F32x16 tail = MulAdd16(factor, LoadFirst16(x + k, n - k), LoadFirst16(y + k, n - k));
    StoreFirst16(tail, y + k, n - k);
  }
}

// y[k] = f(x[k]) register by register; f takes and gives a VF. y may be x.
template <class Function>
HWY_INLINE void MapRow16(const Function& f, const float* x, size_t n, float* y) {
  size_t k = 0;
  for (; k + 16 <= n; k += 16) Store16(Map16(f, Load16(x + k)), y + k);
  if (k < n) StoreFirst16(Map16(f, LoadFirst16(x + k, n - k)), y + k, n - k);
}

// ---- Stored formats, sixteen elements at a time.

HWY_INLINE F32x16 DecodeBf16x16(const uint16_t* p) {
  const hn::Rebind<uint16_t, DF> d16;
  return Parts16([&](size_t part) HWY_ATTR {
    const VU wide = hn::PromoteTo(DU(), hn::LoadU(d16, p + part * kLanes));
    return hn::BitCast(DF(), hn::ShiftLeft<16>(wide));
  });
}

// The kLanes fp8_e4m3 codes at `p`, moved up by 7 bits: as f16, 2^-8 times their values, subnormals
// included, and the NaN code as 480.
HWY_INLINE auto LoadE4m3AsF16Bits(const uint8_t* p) {
  const hn::Rebind<int8_t, DF> d8;
  const hn::Rebind<int16_t, DF> d16;
  const auto wide = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p)));
  return hn::And(hn::ShiftLeft<7>(wide), hn::Set(d16, static_cast<int16_t>(0xbf80)));
}

// fp8_e4m3 by way of f16. The NaN code is set apart.
HWY_INLINE F32x16 DecodeE4m3x16(const uint8_t* p) {
  const DF d;
  const hn::Rebind<int16_t, DF> d16;
  const hn::Rebind<hwy::float16_t, DF> dh;
  return Parts16([&](size_t part) HWY_ATTR {
    const auto bits = LoadE4m3AsF16Bits(p + part * kLanes);
    const auto magnitude = hn::And(bits, hn::Set(d16, 0x7fff));
    const auto is_nan = hn::Eq(magnitude, hn::Set(d16, 0x3f80));
    const auto to_quiet = hn::IfThenElseZero(is_nan, hn::Set(d16, 0x3f80 ^ 0x7e00));
    const auto half = hn::BitCast(dh, hn::Xor(bits, to_quiet));
    return hn::Mul(hn::PromoteTo(d, half), hn::Set(d, 256.0f));
  });
}

// 2^-8 times the values of codes none of which is NaN: half the work.
HWY_INLINE F32x16 DecodeHalfE4m3x16(const uint8_t* p) {
  const hn::Rebind<hwy::float16_t, DF> dh;
  return Parts16([&](size_t part) HWY_ATTR {
    return hn::PromoteTo(DF(), hn::BitCast(dh, LoadE4m3AsF16Bits(p + part * kLanes)));
  });
}

// Whether none of n e4m3 codes is NaN.
HWY_INLINE bool IsFiniteE4m3(const uint8_t* p, size_t n) {
  const hn::Repartition<uint8_t, DF> d;
  const hn::FixedTag<uint8_t, 16> d16;
  const size_t lanes = hn::Lanes(d);
  const auto nan = hn::Set(d, uint8_t{0x7f});
  auto largest = hn::Zero(d);
  size_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    largest = hn::Max(largest, hn::And(hn::LoadU(d, p + i), nan));
  }
  bool is_finite = hn::AllFalse(d, hn::Eq(largest, nan));
  for (; i + 16 <= n; i += 16) {
    const auto rest = hn::And(hn::LoadU(d16, p + i), hn::Set(d16, uint8_t{0x7f}));
    is_finite = is_finite && hn::AllFalse(d16, hn::Eq(rest, hn::Set(d16, uint8_t{0x7f})));
  }
  for (; i < n; ++i) is_finite = is_finite && (p[i] & 0x7f) != 0x7f;
  return is_finite;
}

// ue8m0: byte 0 is 2^-127, a subnormal; 255 is NaN.
HWY_INLINE F32x16 DecodeUe8m0x16(const uint8_t* p) {
  const DU du;
  const hn::Rebind<uint8_t, DF> d8;
  return Parts16([&](size_t part) HWY_ATTR {
    const VU byte = hn::PromoteTo(du, hn::LoadU(d8, p + part * kLanes));
    VU bits = hn::ShiftLeft<23>(byte);
    bits = hn::IfThenElse(hn::Eq(byte, hn::Zero(du)), hn::Set(du, 0x400000u), bits);
    bits = hn::IfThenElse(hn::Eq(byte, hn::Set(du, 255u)), hn::Set(du, 0x7fc00000u), bits);
    return hn::BitCast(DF(), bits);
  });
}

// Sixteen bytes of fp4 pairs: lane i of `low` and `high` from the nibbles of byte i.
HWY_INLINE void DecodeE2m1Pairs16(const uint8_t* p, F32x16* low, F32x16* high) {
  const DU du;
  const hn::Rebind<uint8_t, DF> d8;
  ISTHMUS_UNROLL
  for (size_t part = 0; part < kParts; ++part) {
    const VU byte = hn::PromoteTo(du, hn::LoadU(d8, p + part * kLanes));
    low->v[part] = ValueE2m1V(byte);
    high->v[part] = ValueE2m1V(hn::ShiftRight<4>(byte));
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#endif  // ISTHMUS_KERNELS_CORE_SIMD_INL_H_
