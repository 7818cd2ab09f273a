// SPDX-License-Identifier: Apache-2.0
// The streamed loop of the CPU matrix product (gemm-inl.h), for decode steps of many sequences: up
// to 16 packed rows fill the registers with sums, and each weight is decoded for them as it comes.
// Decoding runs on ports that FMAs leave free, so that its cost hides, and no decoded panel takes
// room in L1. On AVX-512 only.

#if defined(ISTHMUS_KERNELS_CORE_GEMM_STREAMED_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ISTHMUS_KERNELS_CORE_GEMM_STREAMED_INL_H_
#undef ISTHMUS_KERNELS_CORE_GEMM_STREAMED_INL_H_
#else
#define ISTHMUS_KERNELS_CORE_GEMM_STREAMED_INL_H_
#endif

#include <hwy/cache_control.h>

#include <algorithm>

#include "kernels/core/gemm_blocks.h"
#include "kernels/core/gemm_decode-inl.h"
#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

// Rows that are streamed. AVX2 has too few registers: its smaller tiles would decode too often.
inline constexpr bool kStreams = kLanes == 16;
inline constexpr int64_t kStreamTileRows = 16;
inline constexpr int64_t kStreamStepRows = 4;  // The last tile has a multiple of these.
// How far ahead of its use a streamed weight is asked for: it comes from beyond L2.
inline constexpr int64_t kAheadBytes = 1024;
inline bool IsStreamed(int64_t rows) {
  return kStreams && rows > kFusedRows && rows <= kStreamedRows;
}
// Rows of the streamed tile that begins where `left` rows are left.
inline int64_t StreamedRows(int64_t left) {
  return left >= kStreamTileRows ? kStreamTileRows
                                 : (left + kStreamStepRows - 1) / kStreamStepRows * kStreamStepRows;
}

// acc[r][p] += x[k][r] * w[p][k] for k in [begin, end) of the block.
template <WeightFormat kFormat, bool kFinite, int kRows, int kWidth>
HWY_INLINE void StreamGroup(const float* HWY_RESTRICT x, const PanelBlock* blocks, int64_t begin,
                            int64_t end, F32x16 (&acc)[kRows][kWidth]) {
  constexpr int64_t kStep = kPairs<kFormat> ? 2 : 1;
  for (int64_t k = begin; k < end; k += kStep) {
    F32x16 weight[kStep][kWidth];
    ISTHMUS_UNROLL
    for (int p = 0; p < kWidth; ++p) {
      if constexpr (kPairs<kFormat>) {
        DecodeE2m1Pairs16(blocks[p].elements + k * 8, &weight[0][p], &weight[1][p]);
      } else {
        weight[0][p] = DecodeOne<kFormat, kFinite>(blocks[p].elements, k);
      }
      hwy::Prefetch(blocks[p].elements + k * kInputBytes<kFormat> + kAheadBytes);
    }
    ISTHMUS_UNROLL
    for (int64_t i = 0; i < kStep; ++i) {
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F32x16 factor = Set16(x[(k + i) * kRows + r]);
        ISTHMUS_UNROLL
        for (int p = 0; p < kWidth; ++p) acc[r][p] = MulAdd16(factor, weight[i][p], acc[r][p]);
      }
    }
  }
}

// One block of kWidth panels: totals[r][p][16] += scale * (x . w).
template <WeightFormat kFormat, bool kFinite, int kRows, int kWidth>
HWY_INLINE void StreamBlock(const WeightView& w, const float* x, const PanelBlock* blocks,
                            int64_t kn, float* totals) {
  const int64_t group = SumGroup(w);
  for (int64_t begin = 0, g = 0; begin < kn; begin += group, ++g) {
    F32x16 acc[kRows][kWidth];
    ISTHMUS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) acc[r][p] = Zero16();
    }
    StreamGroup<kFormat, kFinite, kRows, kWidth>(x, blocks, begin, std::min(begin + group, kn),
                                                 acc);
    const int64_t byte = g * ScaleStride(w) * kPanelRows;
    ISTHMUS_UNROLL
    for (int p = 0; p < kWidth; ++p) {
      const F32x16 scale = DecodeScale<kFormat>(blocks[p].scales + byte, w.global_scale);
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + (r * kWidth + p) * kPanelRows;
        Store16(MulAdd16(acc[r][p], scale, Load16(total)), total);
      }
    }
  }
}

template <int kWidth>
HWY_INLINE bool AreFinite(const PanelBlock* blocks, int64_t kn) {
  const auto bytes = static_cast<size_t>(kn * kPanelRows);
  return std::all_of(blocks, blocks + kWidth, [bytes](const PanelBlock& block) HWY_ATTR {
    return IsFiniteE4m3(block.elements, bytes);
  });
}

// Panels [panel, panel + kWidth) of the rows from `row`, which lie packed at `x`, [K][kRows].
template <WeightFormat kFormat, int kRows, int kWidth>
HWY_NOINLINE void StreamPanels(const GemmPlan& plan, const float* x, int64_t row, int64_t panel,
                               GemmScratch* scratch) {
  const WeightView& w = plan.w;
  float* totals = scratch->totals;  // The sums of a group leave no registers for them.
  std::fill_n(totals, int64_t{kRows} * kWidth * kPanelRows, 0.0f);
  for (int64_t k0 = 0, kn = 0; k0 < w.cols; k0 += kn) {
    kn = BlockInputs(w, k0);
    PanelBlock blocks[kWidth];
    for (int p = 0; p < kWidth; ++p) blocks[p] = LocateBlock(w, panel + p, k0, kn, p, scratch);
    if constexpr (kFormat == WeightFormat::kFp8Block128) {
      if (AreFinite<kWidth>(blocks, kn)) {
        StreamBlock<kFormat, true, kRows, kWidth>(w, x + k0 * kRows, blocks, kn, totals);
        continue;
      }
    }
    StreamBlock<kFormat, false, kRows, kWidth>(w, x + k0 * kRows, blocks, kn, totals);
  }
  const int64_t rows = std::min<int64_t>(kRows, plan.x.rows - row);
  for (int p = 0; p < kWidth; ++p) {
    for (int64_t r = 0; r < rows; ++r) {
      StoreSums(plan, row + r, panel + p, Load16(totals + (r * kWidth + p) * kPanelRows));
    }
  }
}

// The tile of kRows rows from `row`: 16 sums, or 12.
template <WeightFormat kFormat, int kRows>
HWY_INLINE void StreamTile(const GemmPlan& plan, int64_t row, int64_t begin, int64_t end,
                           GemmScratch* scratch) {
  constexpr int kWidth = 16 / kRows;
  static_assert(kWidth <= kFusedPanels);
  const float* x = plan.packed_x + row * plan.w.cols;
  int64_t panel = begin;
  for (; panel + kWidth <= end; panel += kWidth) {
    StreamPanels<kFormat, kRows, kWidth>(plan, x, row, panel, scratch);
  }
  if constexpr (kWidth > 1) {
    for (; panel < end; ++panel) StreamPanels<kFormat, kRows, 1>(plan, x, row, panel, scratch);
  }
}

template <WeightFormat kFormat>
void StreamItem(const GemmPlan& plan, int64_t begin, int64_t end, GemmScratch* scratch) {
  for (int64_t row = 0; row < plan.x.rows; row += kStreamTileRows) {
    switch (StreamedRows(plan.x.rows - row)) {
      case 4:
        StreamTile<kFormat, 4>(plan, row, begin, end, scratch);
        break;
      case 8:
        StreamTile<kFormat, 8>(plan, row, begin, end, scratch);
        break;
      case 12:
        StreamTile<kFormat, 12>(plan, row, begin, end, scratch);
        break;
      default:
        StreamTile<kFormat, 16>(plan, row, begin, end, scratch);
    }
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#endif  // ISTHMUS_KERNELS_CORE_GEMM_STREAMED_INL_H_
