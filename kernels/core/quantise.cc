// SPDX-License-Identifier: Apache-2.0
// Each function runs group by group: the largest magnitude gives the power-of-two scale by the
// scalar rule of formats.h, and the elements follow sixteen at a time. Dividing by a power of two
// and multiplying by its inverse round alike, so the vector code multiplies. A group with an
// infinity has an infinite scale, whose inverse is zero, and comes out as NaN.
#include "kernels/core/quantise.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/formats.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/core/quantise.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "kernels/core/kv_entry-inl.h"
#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

void RoundBf16RowT(const float* x, int64_t n, float* out) {
  MapRow16([](VF v) HWY_ATTR { return RoundBf16V(v); }, x, static_cast<size_t>(n), out);
}

// out = codec(x / 2^exponent) * 2^exponent over one group.
template <class Codec>
HWY_INLINE void RoundTripGroup(const Codec& codec, const float* x, size_t n, int exponent,
                               float* out) {
  const DF d;
  const VF inverse = hn::Set(d, 1.0f / PowerOfTwo(exponent));
  const VF scale = hn::Set(d, PowerOfTwo(exponent));
  const auto round = [&](VF v) HWY_ATTR { return hn::Mul(codec(hn::Mul(v, inverse)), scale); };
  MapRow16(round, x, n, out);
}

void RoundTripFp8RowT(const float* x, int64_t n, int64_t block, float* out) {
  for (int64_t k = 0; k < n; k += block) {
    const auto count = static_cast<size_t>(std::min(block, n - k));
    const int exponent = Fp8ScaleExponent(MaxAbs16(x + k, count));
    RoundTripGroup([](VF v) HWY_ATTR { return RoundE4m3V(v); }, x + k, count, exponent, out + k);
  }
}

void RoundTripFp4RowT(const float* x, int64_t n, float* out) {
  for (int64_t k = 0; k < n; k += kIndexKeyBlock) {
    const auto count = static_cast<size_t>(std::min<int64_t>(kIndexKeyBlock, n - k));
    const int exponent = Fp4ScaleExponent(MaxAbs16(x + k, count));
    const auto round = [](VF v) HWY_ATTR { return ValueE2m1V(CodeE2m1V(v)); };
    RoundTripGroup(round, x + k, count, exponent, out + k);
  }
}

// Stores the low byte of each of sixteen codes.
template <class Code>
HWY_INLINE void StoreCodes16(const Code& code, const F32x16& x, uint8_t* out) {
  const hn::Rebind<uint8_t, DF> d8;
  for (size_t part = 0; part < kParts; ++part) {
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(DI(), code(x.v[part]))), d8, out + part * kLanes);
  }
}

void EncodeKvEntryT(const float* x, int head_dim, int rope_dim, uint8_t* data, uint8_t* scale) {
  const int nope = head_dim - rope_dim;
  std::memset(scale, 0, 8);
  for (int k = 0; k < nope; k += kKvNopeBlock) {
    const int exponent = Fp8ScaleExponent(MaxAbs16(x + k, kKvNopeBlock));
    scale[k / kKvNopeBlock] = static_cast<uint8_t>(exponent + 127);
    const F32x16 inverse = Set16(1.0f / PowerOfTwo(exponent));
    for (int i = k; i < k + kKvNopeBlock; i += 16) {
      const auto code = [](VF v) HWY_ATTR { return CodeE4m3V(v); };
      StoreCodes16(code, Mul16(Load16(x + i), inverse), data + i);
    }
  }
  for (int k = 0; k < rope_dim; ++k) {
    const uint16_t bits = Bf16Bits(x[nope + k]);
    std::memcpy(data + nope + int64_t{2} * k, &bits, sizeof(bits));
  }
}

void DecodeKvEntryT(const uint8_t* data, const uint8_t* scale, int head_dim, int rope_dim,
                    float* out) {
  DecodeKvEntryInline(data, scale, head_dim, rope_dim, out);
}

void EncodeIndexKeyT(const float* x, int dim, uint8_t* data, uint8_t* scale) {
  uint8_t codes[kIndexKeyBlock];
  for (int k = 0; k < dim; k += kIndexKeyBlock) {
    const int exponent = Fp4ScaleExponent(MaxAbs16(x + k, kIndexKeyBlock));
    scale[k / kIndexKeyBlock] = static_cast<uint8_t>(exponent + 127);
    const F32x16 inverse = Set16(1.0f / PowerOfTwo(exponent));
    for (int i = 0; i < kIndexKeyBlock; i += 16) {
      const auto code = [](VF v) HWY_ATTR { return CodeE2m1V(v); };
      StoreCodes16(code, Mul16(Load16(x + k + i), inverse), codes + i);
    }
    for (int64_t i = 0; i < kIndexKeyBlock / 2; ++i) {
      data[k / 2 + i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    }
  }
}

// One block of 32 is sixteen bytes of pairs; even elements from the low nibbles.
void DecodeIndexKeyT(const uint8_t* data, const uint8_t* scale, int dim, float* out) {
  float even[16];
  float odd[16];
  for (int k = 0; k < dim; k += kIndexKeyBlock) {
    const F32x16 factor = Set16(Ue8m0Value(scale[k / kIndexKeyBlock]));
    F32x16 low;
    F32x16 high;
    DecodeE2m1Pairs16(data + k / 2, &low, &high);
    Store16(Mul16(low, factor), even);
    Store16(Mul16(high, factor), odd);
    for (int i = 0; i < 16; ++i) {
      out[k + 2 * i] = even[i];
      out[k + 2 * i + 1] = odd[i];
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {

HWY_EXPORT(RoundBf16RowT);
HWY_EXPORT(RoundTripFp8RowT);
HWY_EXPORT(RoundTripFp4RowT);
HWY_EXPORT(EncodeKvEntryT);
HWY_EXPORT(DecodeKvEntryT);
HWY_EXPORT(EncodeIndexKeyT);
HWY_EXPORT(DecodeIndexKeyT);

namespace {
uint8_t* Bytes(std::byte* p) { return reinterpret_cast<uint8_t*>(p); }
const uint8_t* Bytes(const std::byte* p) { return reinterpret_cast<const uint8_t*>(p); }
}  // namespace

void RoundBf16Row(const float* x, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(RoundBf16RowT)(x, n, out);
}
void RoundTripFp8Row(const float* x, int64_t n, int64_t block, float* out) {
  HWY_DYNAMIC_DISPATCH(RoundTripFp8RowT)(x, n, block, out);
}
void RoundTripFp4Row(const float* x, int64_t n, float* out) {
  HWY_DYNAMIC_DISPATCH(RoundTripFp4RowT)(x, n, out);
}
void EncodeKvEntry(const float* x, int head_dim, int rope_dim, std::byte* data, std::byte* scale) {
  HWY_DYNAMIC_DISPATCH(EncodeKvEntryT)(x, head_dim, rope_dim, Bytes(data), Bytes(scale));
}
void DecodeKvEntry(const std::byte* data, const std::byte* scale, int head_dim, int rope_dim,
                   float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeKvEntryT)(Bytes(data), Bytes(scale), head_dim, rope_dim, out);
}
void EncodeIndexKey(const float* x, int dim, std::byte* data, std::byte* scale) {
  HWY_DYNAMIC_DISPATCH(EncodeIndexKeyT)(x, dim, Bytes(data), Bytes(scale));
}
void DecodeIndexKey(const std::byte* data, const std::byte* scale, int dim, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodeIndexKeyT)(Bytes(data), Bytes(scale), dim, out);
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
