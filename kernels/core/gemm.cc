// SPDX-License-Identifier: Apache-2.0
// Plans, scratch and the parallel loop; the arithmetic stands in gemm-inl.h.
#include "kernels/core/gemm.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/formats.h"
#include "kernels/core/gemm_blocks.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "services/base/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/core/gemm.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep

#include "kernels/core/gemm-inl.h"

#if HWY_ONCE
namespace isthmus::kernels {

HWY_EXPORT(GemmItemT);
HWY_EXPORT(GemmTileRowsT);
HWY_EXPORT(GemmPackedRowsT);
HWY_EXPORT(GemmPanelsT);
HWY_EXPORT(PackTileT);

namespace {

// Work of one item in vectors of 16 weights or FMAs, whichever is more: some 10 microseconds, so
// that an item outweighs its hand-over and two threads still balance.
constexpr int64_t kItemWork = 16384;
// About as long as one decoded vector takes, in FMAs.
constexpr int64_t kDecodeCost = 4;

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

void CheckTask(const GemmTask& t) {
  ISTHMUS_CHECK(t.x.dtype == DType::kF32 && t.out.dtype == DType::kF32);
  ISTHMUS_CHECK(t.x.cols == t.w.cols);
  ISTHMUS_CHECK(t.out.rows == t.x.rows && t.out.cols == t.w.rows);
  const int64_t group = ScaleGroup(t.w.format);
  ISTHMUS_CHECK(!IsFp4(t.w.format) || t.w.cols % group == 0);
  ISTHMUS_CHECK(t.w.first_col == 0 || t.w.format == WeightFormat::kFp8Block128);
  ISTHMUS_CHECK(group == 0 || t.w.rows * t.w.cols == 0 || t.w.scales != nullptr);
  ISTHMUS_CHECK(!t.w.is_mxfp4_cast || (t.w.format == WeightFormat::kNvfp4 && t.w.cols % 32 == 0));
}

GemmPlan MakePlan(const GemmTask& t) {
  GemmPlan plan;
  plan.x = t.x;
  plan.w = t.w;
  plan.out = t.out;
  plan.rounds = t.rounds;
  plan.panels = CeilDiv(t.w.rows, kPanelRows);
  plan.tile_rows = HWY_DYNAMIC_DISPATCH(GemmTileRowsT)(t.x.rows);
  int64_t rows = t.x.rows;
  if (rows > kFusedRows) {
    plan.row_blocks = CeilDiv(rows, plan.tile_rows * kTilesPerBlock);
    rows = std::min(rows, plan.tile_rows * kTilesPerBlock);
  }
  const int64_t work = std::max<int64_t>(1, t.w.cols * (kDecodeCost + rows));
  // A multiple of what the loops take side by side, so that no item has a slow rest; a narrow
  // product is cut finer where that costs nothing, as it would be one item.
  const int64_t side =
      plan.panels > kFusedPanels ? kFusedPanels : HWY_DYNAMIC_DISPATCH(GemmPanelsT)(t.x.rows);
  plan.panels_per_item = CeilDiv(CeilDiv(kItemWork, work), side) * side;
  plan.panel_items = CeilDiv(plan.panels, plan.panels_per_item);
  return plan;
}

bool SameInput(const MatrixView& a, const MatrixView& b) {
  return a.data == b.data && a.rows == b.rows && a.cols == b.cols && a.row_stride == b.row_stride;
}

// Packs the rows of all products that need it, tile by tile in one loop.
void PackRows(const GemmPlan* plans, int64_t count, int64_t tiles, const Exec& exec) {
  int64_t largest = 1;
  for (int64_t i = 0; i < count; ++i) {
    largest = std::max(largest, plans[i].tile_rows * plans[i].x.cols);
  }
  const int64_t grain = std::max<int64_t>(1, 2 * kItemWork / largest);
  ParallelFor(exec, tiles, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = begin; tile < end; ++tile) {
      const GemmPlan* plan =
          std::upper_bound(plans, plans + count, tile,
                           [](int64_t value, const GemmPlan& p) { return value < p.first_tile; });
      --plan;
      const int64_t first = (tile - plan->first_tile) * plan->tile_rows;
      HWY_DYNAMIC_DISPATCH(PackTileT)(plan->x, first, plan->packed_x + first * plan->x.cols);
    }
  });
}

}  // namespace

void Gemm(const MatrixView& x, const WeightView& w, const MatrixView& out, const Exec& exec,
          bool rounds) {
  const GemmTask task = {x, w, out, rounds};
  GemmMany({&task, 1}, exec);
}

void GemmMany(std::span<const GemmTask> tasks, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  const auto count = static_cast<int64_t>(tasks.size());
  auto* plans = scope.Take<GemmPlan>(count);
  int64_t items = 0;
  int64_t tiles = 0;
  for (int64_t i = 0; i < count; ++i) {
    const GemmTask& t = tasks[static_cast<size_t>(i)];
    CheckTask(t);
    plans[i] = MakePlan(t);
    plans[i].first_item = items;
    plans[i].first_tile = tiles;
    items += t.x.rows == 0 ? 0 : plans[i].row_blocks * plans[i].panel_items;
    if (t.x.rows <= kFusedRows) continue;
    // Neighbours often share their input (gate and up of an expert): pack it once.
    if (i > 0 && SameInput(plans[i - 1].x, t.x)) {
      plans[i].packed_x = plans[i - 1].packed_x;
      continue;
    }
    plans[i].packed_x =
        scope.Take<float>(HWY_DYNAMIC_DISPATCH(GemmPackedRowsT)(t.x.rows) * t.x.cols);
    tiles += CeilDiv(t.x.rows, plans[i].tile_rows);
  }
  PackRows(plans, count, tiles, exec);
  auto* scratch = scope.Take<GemmScratch>(NumThreads(exec));
  ParallelFor(exec, items, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t item = begin; item < end; ++item) {
      const GemmPlan* plan =
          std::upper_bound(plans, plans + count, item,
                           [](int64_t value, const GemmPlan& p) { return value < p.first_item; });
      --plan;  // The last one that starts at or before the item.
      HWY_DYNAMIC_DISPATCH(GemmItemT)(*plan, item - plan->first_item, scratch + thread);
    }
  });
}

int64_t GemmScratchBytes(std::span<const GemmInput> inputs, int threads) {
  ScratchCount scratch;
  scratch.Take<GemmPlan>(static_cast<int64_t>(inputs.size()));
  for (const GemmInput& x : inputs) {
    if (x.rows <= kFusedRows || x.is_shared) continue;
    scratch.Take<float>(HWY_DYNAMIC_DISPATCH(GemmPackedRowsT)(x.rows) * x.inputs);
  }
  scratch.Take<GemmScratch>(threads);
  return scratch.peak_bytes();
}

double WeightValue(const WeightView& w, int64_t n, int64_t k) {
  const bool panels = w.layout == WeightLayout::kPanels;
  const int64_t panel = n / kPanelRows;
  const int64_t lane = n % kPanelRows;
  // Index of unit u of row n among rows of `units` units.
  const auto index = [&](int64_t units, int64_t u) {
    return panels ? (panel * units + u) * kPanelRows + lane : n * units + u;
  };
  const auto* bytes = static_cast<const uint8_t*>(w.elements);
  switch (w.format) {
    case WeightFormat::kF32: {
      float value = 0.0f;
      std::memcpy(&value, bytes + 4 * index(w.cols, k), sizeof(value));
      return value;
    }
    case WeightFormat::kBf16: {
      uint16_t value = 0;
      std::memcpy(&value, bytes + 2 * index(w.cols, k), sizeof(value));
      return Bf16Value(value);
    }
    case WeightFormat::kFp8Block128: {
      const int64_t block = (w.first_row + n) / 128 * ScaleColumns(w) + ScaleColumn(w, k);
      return double{Fp8E4m3Value(bytes[index(w.cols, k)])} * Ue8m0Value(w.scales[block]);
    }
    default: {
      const uint8_t pair = bytes[index(w.cols / 2, k / 2)];
      const auto code = static_cast<uint8_t>(k % 2 == 0 ? pair & 15 : pair >> 4);
      const int64_t group = ScaleGroup(w.format);
      // NOLINTNEXTLINE(clang-analyzer-core.DivideZero): the two formats left have scale groups.
      const uint8_t scale = w.scales[index(w.cols / group, k / group)];
      const double element = Fp4E2m1Value(code);
      if (w.format == WeightFormat::kMxfp4) return element * Ue8m0Value(scale);
      return element * Fp8E4m3Value(scale) * w.global_scale;
    }
  }
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
