// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of rope. A table of one token's sines and cosines on the stack serves all of
// its heads. Elementwise, with plain products and sums, so the bits depend on no vector width.
//
// Letters: t token, h head, i pair, k element of the rotated part.
#include <algorithm>

#include "kernels/core/math.h"
#include "kernels/rope/rope_variants.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/rope_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/simd-inl.h"
// clang-format on

#ifndef ISTHMUS_KERNELS_ROPE_CPU_ONCE_
#define ISTHMUS_KERNELS_ROPE_CPU_ONCE_
namespace isthmus::kernels {
namespace {

// (a, b) <- (a cos - b sin, a sin + b cos) is x * cosine + swapped(x) * sine, with the cosine of
// each pair twice and its sine as (-sin, sin).
struct RopeTable {
  alignas(64) float cosine[2 * kMaxRopePairs];
  alignas(64) float sine[2 * kMaxRopePairs];
};

void FillTable(int64_t position, const RopeArgs& args, RopeTable* table) {
  const auto at = static_cast<float>(position);
  for (size_t i = 0; i < args.frequency.size(); ++i) {
    float sine = 0.0f;
    float cosine = 0.0f;
    SinCos(at * args.frequency[i], &sine, &cosine);
    if (args.inverse) sine = -sine;
    table->cosine[2 * i] = table->cosine[2 * i + 1] = cosine;
    table->sine[2 * i] = -sine;
    table->sine[2 * i + 1] = sine;
  }
}

}  // namespace
}  // namespace isthmus::kernels
#endif  // ISTHMUS_KERNELS_ROPE_CPU_ONCE_

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {
namespace {

HWY_INLINE F32x16 Rotated(const F32x16& x, const F32x16& cosine, const F32x16& sine, bool round) {
  const F32x16 swapped = Map16([](VF v) HWY_ATTR { return hn::Reverse2(DF(), v); }, x);
  const F32x16 y = Add16(Mul16(x, cosine), Mul16(swapped, sine));
  return round ? RoundBf16x16(y) : y;
}

// Tokens [begin, end), every head.
void RotateRows(const RopeArgs& args, int64_t begin, int64_t end) {
  const bool round = args.arithmetic == Arithmetic::kReference;
  const size_t n = 2 * args.frequency.size();
  RopeTable table;
  for (int64_t t = begin; t < end; ++t) {
    FillTable(args.positions[t], args, &table);
    float* row = args.x.f32(t);
    for (int64_t head = args.head_dim; head <= args.x.cols; head += args.head_dim) {
      float* x = row + head - n;
      size_t k = 0;
      for (; k + 16 <= n; k += 16) {
        const F32x16 cosine = Load16(table.cosine + k);
        Store16(Rotated(Load16(x + k), cosine, Load16(table.sine + k), round), x + k);
      }
      if (k == n) continue;
      const F32x16 cosine = LoadFirst16(table.cosine + k, n - k);
      const F32x16 sine = LoadFirst16(table.sine + k, n - k);
      StoreFirst16(Rotated(LoadFirst16(x + k, n - k), cosine, sine, round), x + k, n - k);
    }
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

HWY_EXPORT(RotateRows);

// Rotated elements that are worth handing to another thread.
constexpr int64_t kGrainElements = 4096;

}  // namespace

absl::Status LaunchRopeCpu(const RopeArgs& args, const Exec& exec) {
  const auto rows = HWY_DYNAMIC_DISPATCH(RotateRows);
  const auto rotated = static_cast<int64_t>(2 * args.frequency.size());
  const int64_t row_elements = args.x.cols / args.head_dim * rotated;
  const int64_t grain = std::max<int64_t>(1, kGrainElements / row_elements);
  ParallelFor(exec, args.x.rows, grain,
              [&](int64_t begin, int64_t end, int) { rows(args, begin, end); });
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
