// SPDX-License-Identifier: Apache-2.0
// Decoding of a stored KV entry, once per SIMD target, for whoever uses the values at once. To be
// included from a foreach_target source.

#if defined(ISTHMUS_KERNELS_CORE_KV_ENTRY_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ISTHMUS_KERNELS_CORE_KV_ENTRY_INL_H_
#undef ISTHMUS_KERNELS_CORE_KV_ENTRY_INL_H_
#else
#define ISTHMUS_KERNELS_CORE_KV_ENTRY_INL_H_
#endif

#include <algorithm>

#include "kernels/core/formats.h"
#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

// e4m3 values under one power of two; kFinite: no code is NaN, and 2^8 * factor is finite.
template <bool kFinite>
HWY_INLINE void DecodeNope(const uint8_t* data, const uint8_t* scale, int nope, float* out) {
  for (int k = 0; k < nope; k += kKvNopeBlock) {
    const float factor = Ue8m0Value(scale[k / kKvNopeBlock]);
    for (int i = k; i < k + kKvNopeBlock; i += 16) {
      if constexpr (kFinite) {
        // Both factors are powers of two, so that their product may come first.
        Store16(Mul16(DecodeHalfE4m3x16(data + i), Set16(256.0f * factor)), out + i);
      } else {
        Store16(Mul16(DecodeE4m3x16(data + i), Set16(factor)), out + i);
      }
    }
  }
}

// See quantise.h. `rope_dim` is a multiple of 16.
HWY_INLINE void DecodeKvEntryInline(const uint8_t* data, const uint8_t* scale, int head_dim,
                                    int rope_dim, float* out) {
  const int nope = head_dim - rope_dim;
  constexpr uint8_t kLargestScale = 127 + 119;
  const bool is_finite = IsFiniteE4m3(data, static_cast<size_t>(nope)) &&
                         *std::max_element(scale, scale + nope / kKvNopeBlock) <= kLargestScale;
  if (is_finite) {
    DecodeNope<true>(data, scale, nope, out);
  } else {
    DecodeNope<false>(data, scale, nope, out);
  }
  int k = 0;
  const uint8_t* rope = data + nope;  // At an even address or not.
  for (; k + 16 <= rope_dim; k += 16) {
    Store16(DecodeBf16x16(reinterpret_cast<const uint16_t*>(rope + int64_t{2} * k)),
            out + nope + k);
  }
  for (; k < rope_dim; ++k) {
    uint16_t bits = 0;
    std::memcpy(&bits, rope + int64_t{2} * k, sizeof(bits));
    out[nope + k] = Bf16Value(bits);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#endif  // ISTHMUS_KERNELS_CORE_KV_ENTRY_INL_H_
