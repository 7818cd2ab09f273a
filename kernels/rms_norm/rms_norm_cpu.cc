// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of rms_norm, the one that serves. Bound by memory: x is read twice, the
// second time from L1 or L2. The sum of squares is the dot product of simd-inl.h (16 named partial
// sums, one fixed tree), so a row's bits depend on nothing but the row.
#include <algorithm>
#include <cmath>

#include "kernels/rms_norm/rms_norm_variants.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rms_norm/rms_norm_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {
namespace {

// round(x * scale * weight), multiplied from the left.
template <bool kHasWeight, bool kRound>
HWY_INLINE F32x16 Scaled(const F32x16& x, const F32x16& scale, const F32x16& weight) {
  F32x16 value = Mul16(x, scale);
  if constexpr (kHasWeight) value = Mul16(value, weight);
  if constexpr (kRound) value = RoundBf16x16(value);
  return value;
}

template <bool kHasWeight, bool kRound>
void NormaliseRows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const auto n = static_cast<size_t>(args.x.cols);
  const float* weight = args.weight.f32();
  for (int64_t t = begin; t < end; ++t) {
    const float* x = args.x.f32(t);
    float* out = args.out.f32(t);
    const float mean = Dot16(x, x, n) / static_cast<float>(n);
    const F32x16 scale = Set16(1.0f / std::sqrt(mean + args.epsilon));
    F32x16 w = scale;  // Not read without a weight.
    size_t k = 0;
    for (; k + 16 <= n; k += 16) {
      if constexpr (kHasWeight) w = Load16(weight + k);
      Store16(Scaled<kHasWeight, kRound>(Load16(x + k), scale, w), out + k);
    }
    if (k == n) continue;
    if constexpr (kHasWeight) w = LoadFirst16(weight + k, n - k);
    const F32x16 tail = LoadFirst16(x + k, n - k);
    StoreFirst16(Scaled<kHasWeight, kRound>(tail, scale, w), out + k, n - k);
  }
}

void Rows(const RmsNormArgs& args, int64_t begin, int64_t end) {
  const bool round = args.arithmetic == Arithmetic::kReference;
  if (args.weight.size != 0) {
    (round ? NormaliseRows<true, true> : NormaliseRows<true, false>)(args, begin, end);
  } else {
    (round ? NormaliseRows<false, true> : NormaliseRows<false, false>)(args, begin, end);
  }
}

}  // namespace
// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
namespace {

HWY_EXPORT(Rows);

// Elements that are worth handing to another thread.
constexpr int64_t kGrainElements = 16384;

}  // namespace

absl::Status LaunchRmsNormCpu(const RmsNormArgs& args, const Exec& exec) {
  const auto rows = HWY_DYNAMIC_DISPATCH(Rows);
  const int64_t grain = std::max<int64_t>(1, kGrainElements / args.x.cols);
  ParallelFor(exec, args.x.rows, grain,
              [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
