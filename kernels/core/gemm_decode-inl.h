// SPDX-License-Identifier: Apache-2.0
// Weights of a panel as the loops of the CPU matrix product take them, once per SIMD target.

#if defined(ISTHMUS_KERNELS_CORE_GEMM_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ISTHMUS_KERNELS_CORE_GEMM_DECODE_INL_H_
#undef ISTHMUS_KERNELS_CORE_GEMM_DECODE_INL_H_
#else
#define ISTHMUS_KERNELS_CORE_GEMM_DECODE_INL_H_
#endif

#include <algorithm>

#include "kernels/core/gemm_blocks.h"
#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

template <WeightFormat kFormat>
inline constexpr bool kPairs = kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kNvfp4;

// Bytes of one input of a panel.
template <WeightFormat kFormat>
inline constexpr int64_t kInputBytes = kFormat == WeightFormat::kF32
                                           ? 64
                                           : (kFormat == WeightFormat::kBf16
                                                  ? 32
                                                  : (kPairs<kFormat> ? 8 : 16));

// The weights of input k (not for pairs); kFinite: no code of the block is NaN.
template <WeightFormat kFormat, bool kFinite = false>
HWY_INLINE F32x16 DecodeOne(const uint8_t* elements, int64_t k) {
  if constexpr (kFormat == WeightFormat::kF32) {
    return Load16(reinterpret_cast<const float*>(elements) + k * 16);
  } else if constexpr (kFormat == WeightFormat::kBf16) {
    return DecodeBf16x16(reinterpret_cast<const uint16_t*>(elements) + k * 16);
  } else if constexpr (kFinite) {
    return Mul16(DecodeHalfE4m3x16(elements + k * 16), Set16(256.0f));
  } else {
    return DecodeE4m3x16(elements + k * 16);
  }
}

template <WeightFormat kFormat>
HWY_INLINE F32x16 DecodeScale(const uint8_t* scales, float global_scale) {
  if constexpr (kFormat == WeightFormat::kNvfp4) {
    return Mul16(DecodeE4m3x16(scales), Set16(global_scale));
  } else if constexpr (kFormat == WeightFormat::kMxfp4 || kFormat == WeightFormat::kFp8Block128) {
    return DecodeUe8m0x16(scales);
  } else {
    return Set16(1.0f);
  }
}

// The sums of panel `panel` of one row, where they belong.
HWY_INLINE void StoreSums(const GemmPlan& plan, int64_t row, int64_t panel, const F32x16& sums) {
  const int64_t first = panel * kPanelRows;
  const auto count = static_cast<size_t>(std::min(kPanelRows, plan.w.rows - first));
  StoreFirst16(plan.rounds ? RoundBf16x16(sums) : sums, plan.out.f32(row) + first, count);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#endif  // ISTHMUS_KERNELS_CORE_GEMM_DECODE_INL_H_
