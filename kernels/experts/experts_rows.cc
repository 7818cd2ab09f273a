// SPDX-License-Identifier: Apache-2.0
#include "kernels/experts/experts_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/experts/experts_rows.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

HWY_INLINE F32x16 RoundIf(bool round, const F32x16& x) { return round ? RoundBf16x16(x) : x; }

// Sixteen lanes of GateRow. Min and Max have the value second, so that a NaN stays one.
HWY_INLINE F32x16 Gate16(F32x16 g, F32x16 u, float limit, float weight, bool round) {
  g = RoundIf(round, g);
  u = RoundIf(round, u);
  if (limit > 0.0f) {
    const F32x16 high = Set16(limit);
    g = Min16(high, g);
    u = Max16(Set16(-limit), Min16(high, u));
  }
  const F32x16 silu = Mul16(g, Sigmoid16(g));
  return RoundIf(round, Mul16(Mul16(silu, u), Set16(weight)));
}

void GateRowT(float* g, const float* u, int64_t n, float limit, float weight, bool round) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    Store16(Gate16(Load16(g + i), Load16(u + i), limit, weight, round), g + i);
  }
  if (i < n) {
    const auto rest = static_cast<size_t>(n - i);
    StoreFirst16(Gate16(LoadFirst16(g + i, rest), LoadFirst16(u + i, rest), limit, weight, round),
                 g + i, rest);
  }
}

void CombineRowT(std::span<const float* const> rows, const float* shared, int64_t n, bool round,
                 float* routed, float* out) {
  for (int64_t i = 0; i < n; i += 16) {
    const auto count = static_cast<size_t>(std::min<int64_t>(16, n - i));
    F32x16 sum = Zero16();
    for (const float* row : rows) {
      sum = Add16(sum, RoundIf(round, LoadFirst16(row + i, count)));
    }
    if (routed != nullptr) StoreFirst16(sum, routed + i, count);
    if (shared != nullptr) sum = Add16(sum, RoundIf(round, LoadFirst16(shared + i, count)));
    StoreFirst16(RoundIf(round, sum), out + i, count);
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {

HWY_EXPORT(GateRowT);
HWY_EXPORT(CombineRowT);

void GateRow(float* g, const float* u, int64_t n, float limit, float weight, bool round) {
  HWY_DYNAMIC_DISPATCH(GateRowT)(g, u, n, limit, weight, round);
}

void CombineRow(std::span<const float* const> rows, const float* shared, int64_t n, bool round,
                float* routed, float* out) {
  HWY_DYNAMIC_DISPATCH(CombineRowT)(rows, shared, n, round, routed, out);
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
