// SPDX-License-Identifier: Apache-2.0
// The loops of the CPU matrix product, once per SIMD target. Three shapes of work give the same
// bits:
//
//   fused     1 to 4 rows: each weight vector is decoded and multiplied at once, several panels
//             side by side so that the chains of FMAs hide their latency. Bound by decoding.
//   streamed  up to kStreamedRows rows on AVX-512, packed: the same with up to 16 rows at once. A
//             weight is decoded for each 16 rows, on ports that FMAs leave free. Bound by FMA.
//   tiled     more rows, packed: a block of 128 inputs of one or two panels is decoded into L1 once
//             and multiplied with up to 16 tiles of rows. Bound by FMA.
//
// In all, output (m, n) sees: acc = 0; acc = fma(x, w, acc) over its group in ascending k;
// total = fma(acc, scale, total) over the groups in ascending order.

#if defined(ISTHMUS_KERNELS_CORE_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ISTHMUS_KERNELS_CORE_GEMM_INL_H_
#undef ISTHMUS_KERNELS_CORE_GEMM_INL_H_
#else
#define ISTHMUS_KERNELS_CORE_GEMM_INL_H_
#endif

#include <algorithm>

#include "kernels/core/gemm_blocks.h"
#include "kernels/core/gemm_decode-inl.h"
#include "kernels/core/gemm_streamed-inl.h"
#include "kernels/core/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

// A register tile: 16 accumulators of 32 registers, or 12 of 16.
inline constexpr int64_t kTileRows = kLanes == 16 ? 8 : 6;
inline constexpr int64_t kTileWidth = kLanes == 16 ? 2 : 1;  // In panels.
static_assert(kTileRows <= kMaxTileRows && kTileWidth <= kTilePanels);

// Panels that the fused loop takes at once for `rows` rows.
template <int kRows>
inline constexpr int kFusedWidth = kLanes == 16 ? (kRows <= 2 ? 4 : 2)
                                                : (kRows == 1 ? 4 : (kRows == 2 ? 2 : 1));

// ---- Fused.

// acc[r][p] += x[r][k] * w[p][k] for k in [begin, end) of the block.
template <WeightFormat kFormat, int kRows, int kWidth>
HWY_INLINE void FusedGroup(const float* const* x, const PanelBlock* blocks, int64_t begin,
                           int64_t end, F32x16 (&acc)[kRows][kWidth]) {
  if constexpr (kPairs<kFormat>) {
    for (int64_t k = begin; k < end; k += 2) {
      F32x16 even[kRows];
      F32x16 odd[kRows];
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        even[r] = Set16(x[r][k]);
        odd[r] = Set16(x[r][k + 1]);
      }
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) {
        F32x16 low;
        F32x16 high;
        DecodeE2m1Pairs16(blocks[p].elements + k * 8, &low, &high);
        ISTHMUS_UNROLL
        for (int r = 0; r < kRows; ++r) {
          acc[r][p] = MulAdd16(even[r], low, acc[r][p]);
          acc[r][p] = MulAdd16(odd[r], high, acc[r][p]);
        }
      }
    }
  } else {
    for (int64_t k = begin; k < end; ++k) {
      F32x16 factor[kRows];
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) factor[r] = Set16(x[r][k]);
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) {
        const F32x16 weight = DecodeOne<kFormat>(blocks[p].elements, k);
        ISTHMUS_UNROLL
        for (int r = 0; r < kRows; ++r) {
          acc[r][p] = MulAdd16(factor[r], weight, acc[r][p]);
        }
      }
    }
  }
}

// Panels [panel, panel + kWidth) of all rows.
template <WeightFormat kFormat, int kRows, int kWidth>
HWY_NOINLINE void FusedPanels(const GemmPlan& plan, int64_t panel, GemmScratch* scratch) {
  const WeightView& w = plan.w;
  const int64_t group = SumGroup(w);
  F32x16 total[kRows][kWidth];
  ISTHMUS_UNROLL
  for (int r = 0; r < kRows; ++r) {
    ISTHMUS_UNROLL
    for (int p = 0; p < kWidth; ++p) total[r][p] = Zero16();
  }
  for (int64_t k0 = 0, kn = 0; k0 < w.cols; k0 += kn) {
    kn = BlockInputs(w, k0);
    const float* x[kRows];
    for (int r = 0; r < kRows; ++r) x[r] = plan.x.f32(r) + k0;
    PanelBlock blocks[kWidth];
    for (int p = 0; p < kWidth; ++p) blocks[p] = LocateBlock(w, panel + p, k0, kn, p, scratch);
    for (int64_t begin = 0, g = 0; begin < kn; begin += group, ++g) {
      F32x16 acc[kRows][kWidth];
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        ISTHMUS_UNROLL
        for (int p = 0; p < kWidth; ++p) acc[r][p] = Zero16();
      }
      FusedGroup<kFormat, kRows, kWidth>(x, blocks, begin, std::min(begin + group, kn), acc);
      const int64_t byte = g * ScaleStride(w) * kPanelRows;
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) {
        const F32x16 scale = DecodeScale<kFormat>(blocks[p].scales + byte, w.global_scale);
        ISTHMUS_UNROLL
        for (int r = 0; r < kRows; ++r) {
          total[r][p] = MulAdd16(acc[r][p], scale, total[r][p]);
        }
      }
    }
  }
  ISTHMUS_UNROLL
  for (int p = 0; p < kWidth; ++p) {
    ISTHMUS_UNROLL
    for (int r = 0; r < kRows; ++r) StoreSums(plan, r, panel + p, total[r][p]);
  }
}

template <WeightFormat kFormat, int kRows>
HWY_INLINE void FusedRows(const GemmPlan& plan, int64_t begin, int64_t end, GemmScratch* scratch) {
  constexpr int kWidth = kFusedWidth<kRows>;
  int64_t panel = begin;
  for (; panel + kWidth <= end; panel += kWidth) {
    FusedPanels<kFormat, kRows, kWidth>(plan, panel, scratch);
  }
  for (; panel < end; ++panel) FusedPanels<kFormat, kRows, 1>(plan, panel, scratch);
}

template <WeightFormat kFormat>
void FusedItem(const GemmPlan& plan, int64_t begin, int64_t end, GemmScratch* scratch) {
  static_assert(kFusedRows == 4);
  switch (plan.x.rows) {
    case 1:
      return FusedRows<kFormat, 1>(plan, begin, end, scratch);
    case 2:
      return FusedRows<kFormat, 2>(plan, begin, end, scratch);
    case 3:
      return FusedRows<kFormat, 3>(plan, begin, end, scratch);
    default:
      return FusedRows<kFormat, 4>(plan, begin, end, scratch);
  }
}

// ---- Tiled.

template <WeightFormat kFormat>
HWY_INLINE void DecodePanel(const WeightView& w, const PanelBlock& block, int64_t kn, float* panel,
                            float* scales) {
  if constexpr (kPairs<kFormat>) {
    for (int64_t k = 0; k < kn; k += 2) {
      F32x16 low;
      F32x16 high;
      DecodeE2m1Pairs16(block.elements + k * 8, &low, &high);
      Store16(low, panel + k * 16);
      Store16(high, panel + k * 16 + 16);
    }
  } else {
    for (int64_t k = 0; k < kn; ++k) Store16(DecodeOne<kFormat>(block.elements, k), panel + k * 16);
  }
  const int64_t group = SumGroup(w);
  for (int64_t g = 0; g * group < kn; ++g) {
    const uint8_t* bytes = block.scales + g * ScaleStride(w) * kPanelRows;
    Store16(DecodeScale<kFormat>(bytes, w.global_scale), scales + g * kPanelRows);
  }
}

// The first kRows rows of a tile over one block of K: totals[r][p][16] += scale * (x . w).
template <int kWidth, int kRows>
HWY_NOINLINE void MultiplyTile(const float* HWY_RESTRICT x, const GemmScratch* HWY_RESTRICT decoded,
                               int64_t kn, int64_t group, float* HWY_RESTRICT totals) {
  for (int64_t begin = 0, g = 0; begin < kn; begin += group, ++g) {
    F32x16 acc[kRows][kWidth];
    ISTHMUS_UNROLL
    for (int r = 0; r < kRows; ++r) {
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) acc[r][p] = Zero16();
    }
    const int64_t end = std::min(begin + group, kn);
    for (int64_t k = begin; k < end; ++k) {
      F32x16 weight[kWidth];
      ISTHMUS_UNROLL
      for (int p = 0; p < kWidth; ++p) {
        weight[p] = Load16(decoded->panels[p] + k * kPanelRows);
      }
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const F32x16 factor = Set16(x[k * kTileRows + r]);
        ISTHMUS_UNROLL
        for (int p = 0; p < kWidth; ++p) {
          acc[r][p] = MulAdd16(factor, weight[p], acc[r][p]);
        }
      }
    }
    ISTHMUS_UNROLL
    for (int p = 0; p < kWidth; ++p) {
      const F32x16 scale = Load16(decoded->scales[p] + g * kPanelRows);
      ISTHMUS_UNROLL
      for (int r = 0; r < kRows; ++r) {
        float* total = totals + (r * kWidth + p) * kPanelRows;
        Store16(MulAdd16(acc[r][p], scale, Load16(total)), total);
      }
    }
  }
}

// Tile `t` over the block [k0, k0 + kn). A last tile of half the rows or fewer costs half.
template <int kWidth>
HWY_INLINE void MultiplyTileAt(const GemmPlan& plan, int64_t t, int64_t k0, int64_t kn,
                               const GemmScratch* scratch, float* totals) {
  constexpr int kHalf = static_cast<int>(kTileRows) / 2;
  const int64_t group = SumGroup(plan.w);
  const int64_t first = t * kTileRows;
  const int64_t rows = std::min(kTileRows, plan.x.rows - first);
  const float* x = plan.packed_x + (first * plan.w.cols + k0 * kTileRows);
  if (rows > kHalf) return MultiplyTile<kWidth, kTileRows>(x, scratch, kn, group, totals);
  return MultiplyTile<kWidth, kHalf>(x, scratch, kn, group, totals);
}

// Panels [panel, panel + kWidth) of the rows of tiles [first_tile, last_tile).
template <WeightFormat kFormat, int kWidth>
HWY_INLINE void TilePanels(const GemmPlan& plan, int64_t first_tile, int64_t last_tile,
                           int64_t panel, GemmScratch* scratch) {
  constexpr int64_t kTileFloats = kTileRows * kWidth * kPanelRows;
  const WeightView& w = plan.w;
  std::fill_n(scratch->totals, (last_tile - first_tile) * kTileFloats, 0.0f);
  for (int64_t k0 = 0, kn = 0; k0 < w.cols; k0 += kn) {
    kn = BlockInputs(w, k0);
    for (int p = 0; p < kWidth; ++p) {
      const PanelBlock block = LocateBlock(w, panel + p, k0, kn, p, scratch);
      DecodePanel<kFormat>(w, block, kn, scratch->panels[p], scratch->scales[p]);
    }
    for (int64_t t = first_tile; t < last_tile; ++t) {
      MultiplyTileAt<kWidth>(plan, t, k0, kn, scratch,
                             scratch->totals + (t - first_tile) * kTileFloats);
    }
  }
  const int64_t first_row = first_tile * kTileRows;
  const int64_t last_row = std::min(last_tile * kTileRows, plan.x.rows);
  for (int64_t row = first_row; row < last_row; ++row) {
    for (int p = 0; p < kWidth; ++p) {
      const float* total = scratch->totals + ((row - first_row) * kWidth + p) * kPanelRows;
      StoreSums(plan, row, panel + p, Load16(total));
    }
  }
}

template <WeightFormat kFormat>
void TileItem(const GemmPlan& plan, int64_t row_block, int64_t begin, int64_t end,
              GemmScratch* scratch) {
  const int64_t tiles = (plan.x.rows + kTileRows - 1) / kTileRows;
  const int64_t first_tile = row_block * kTilesPerBlock;
  const int64_t last_tile = std::min(first_tile + kTilesPerBlock, tiles);
  int64_t panel = begin;
  for (; panel + kTileWidth <= end; panel += kTileWidth) {
    TilePanels<kFormat, kTileWidth>(plan, first_tile, last_tile, panel, scratch);
  }
  for (; panel < end; ++panel) {
    TilePanels<kFormat, 1>(plan, first_tile, last_tile, panel, scratch);
  }
}

// ---- What gemm.cc calls.

template <WeightFormat kFormat>
HWY_INLINE void Item(const GemmPlan& plan, int64_t item, GemmScratch* scratch) {
  const int64_t row_block = item / plan.panel_items;
  const int64_t begin = item % plan.panel_items * plan.panels_per_item;
  const int64_t end = std::min(begin + plan.panels_per_item, plan.panels);
  if (plan.x.rows <= kFusedRows) {
    FusedItem<kFormat>(plan, begin, end, scratch);
  } else if (IsStreamed(plan.x.rows)) {
    if constexpr (kStreams) StreamItem<kFormat>(plan, begin, end, scratch);
  } else {
    TileItem<kFormat>(plan, row_block, begin, end, scratch);
  }
}

inline void GemmItemT(const GemmPlan& plan, int64_t item, GemmScratch* scratch) {
  switch (plan.w.format) {
    case WeightFormat::kF32:
      return Item<WeightFormat::kF32>(plan, item, scratch);
    case WeightFormat::kBf16:
      return Item<WeightFormat::kBf16>(plan, item, scratch);
    case WeightFormat::kFp8Block128:
      return Item<WeightFormat::kFp8Block128>(plan, item, scratch);
    case WeightFormat::kMxfp4:
      return Item<WeightFormat::kMxfp4>(plan, item, scratch);
    case WeightFormat::kNvfp4:
      return Item<WeightFormat::kNvfp4>(plan, item, scratch);
  }
}

// Rows of a tile of `rows` rows that are packed; the last of streamed ones may be smaller.
inline int64_t GemmTileRowsT(int64_t rows) {
  return IsStreamed(rows) ? kStreamTileRows : kTileRows;
}

// Rows of all tiles together.
inline int64_t GemmPackedRowsT(int64_t rows) {
  const int64_t whole = IsStreamed(rows) ? kStreamStepRows : kTileRows;
  return (rows + whole - 1) / whole * whole;
}

// Panels that the loops take side by side for `rows` rows.
inline int64_t GemmPanelsT(int64_t rows) {
  if (!IsStreamed(rows)) return kFusedPanels;
  return kStreamTileRows / StreamedRows(rows);
}

// Four rows from x[first_row] as columns of out[k][stride].
HWY_INLINE void PackFourRows(const MatrixView& x, int64_t first_row, int64_t stride, float* out) {
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> pairs;
  const float* in[4];
  for (int r = 0; r < 4; ++r) in[r] = x.f32(first_row + r);
  int64_t k = 0;
  for (; k + 4 <= x.cols; k += 4) {
    const auto a = hn::LoadU(d, in[0] + k);
    const auto b = hn::LoadU(d, in[1] + k);
    const auto c = hn::LoadU(d, in[2] + k);
    const auto e = hn::LoadU(d, in[3] + k);
    const auto ab_low = hn::BitCast(pairs, hn::InterleaveLower(d, a, b));
    const auto ab_high = hn::BitCast(pairs, hn::InterleaveUpper(d, a, b));
    const auto ce_low = hn::BitCast(pairs, hn::InterleaveLower(d, c, e));
    const auto ce_high = hn::BitCast(pairs, hn::InterleaveUpper(d, c, e));
    float* column = out + k * stride;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, ab_low, ce_low)), d, column);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_low, ce_low)), d, column + stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, ab_high, ce_high)), d,
               column + 2 * stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, ab_high, ce_high)), d,
               column + 3 * stride);
  }
  for (; k < x.cols; ++k) {
    for (int r = 0; r < 4; ++r) out[k * stride + r] = in[r][k];
  }
}

// out[k][rows of the tile] of the tile that begins at row `first`; rows beyond the last are zero.
inline void PackTileT(const MatrixView& x, int64_t first, float* out) {
  const int64_t tile_rows = IsStreamed(x.rows) ? StreamedRows(x.rows - first) : kTileRows;
  const int64_t rows = std::min(tile_rows, x.rows - first);
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) PackFourRows(x, first + r, tile_rows, out + r);
  for (; r < rows; ++r) {
    const float* in = x.f32(first + r);
    for (int64_t k = 0; k < x.cols; ++k) out[k * tile_rows + r] = in[k];
  }
  for (; r < tile_rows; ++r) {
    for (int64_t k = 0; k < x.cols; ++k) out[k * tile_rows + r] = 0.0f;
  }
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#endif  // ISTHMUS_KERNELS_CORE_GEMM_INL_H_
