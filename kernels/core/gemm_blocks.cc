// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/gemm_blocks.h"

#include <algorithm>
#include <cstring>

namespace isthmus::kernels {
namespace {

// out[unit][16] from 16 rows of `row_units` units each, units [first, first + count).
template <typename Unit>
void Transpose(const uint8_t* in, int64_t row_units, int64_t rows, int64_t first, int64_t count,
               uint8_t* out) {
  auto* panel = reinterpret_cast<Unit*>(out);
  for (int64_t i = 0; i < kPanelRows; ++i) {
    if (i >= rows) {
      for (int64_t u = 0; u < count; ++u) panel[u * kPanelRows + i] = Unit{};
      continue;
    }
    // Stored rows need not be aligned to their units.
    const uint8_t* row = in + (i * row_units + first) * static_cast<int64_t>(sizeof(Unit));
    for (int64_t u = 0; u < count; ++u) {
      std::memcpy(&panel[u * kPanelRows + i], row + static_cast<size_t>(u) * sizeof(Unit),
                  sizeof(Unit));
    }
  }
}

struct UnitSize {
  int64_t bytes;  // Of one unit.
  int64_t k;      // Inputs in one unit.
};
UnitSize Unit(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32:
      return {4, 1};
    case WeightFormat::kBf16:
      return {2, 1};
    case WeightFormat::kFp8Block128:
      return {1, 1};
    default:
      return {1, 2};
  }
}

const uint8_t* Elements(const WeightView& w, int64_t panel, int64_t k0, int64_t kn,
                        uint8_t* scratch) {
  const UnitSize unit = Unit(w.format);
  const int64_t row_units = w.cols / unit.k;
  const auto* base =
      static_cast<const uint8_t*>(w.elements) + panel * kPanelRows * row_units * unit.bytes;
  if (w.layout == WeightLayout::kPanels) return base + k0 / unit.k * kPanelRows * unit.bytes;
  const int64_t rows = std::min(kPanelRows, w.rows - panel * kPanelRows);
  switch (unit.bytes) {
    case 4:
      Transpose<uint32_t>(base, row_units, rows, k0, kn, scratch);
      break;
    case 2:
      Transpose<uint16_t>(base, row_units, rows, k0, kn, scratch);
      break;
    default:
      Transpose<uint8_t>(base, row_units, rows, k0 / unit.k, kn / unit.k, scratch);
  }
  return scratch;
}

// Lanes of one panel may lie in two fp8 scale blocks when the view starts inside one.
void Fp8Scales(const WeightView& w, int64_t panel, int64_t k0, uint8_t* out) {
  const int64_t blocks = ScaleColumns(w);
  const int64_t first = w.first_row + panel * kPanelRows;
  const int64_t last = w.first_row + std::min((panel + 1) * kPanelRows, w.rows) - 1;
  const uint8_t* column = w.scales + ScaleColumn(w, k0);
  if (first / 128 == last / 128) {
    std::memset(out, column[first / 128 * blocks], kPanelRows);
    return;
  }
  for (int64_t i = 0; i < kPanelRows; ++i) {
    out[i] = column[std::min(first + i, last) / 128 * blocks];
  }
}

}  // namespace

PanelBlock LocateBlock(const WeightView& w, int64_t panel, int64_t k0, int64_t kn, int64_t slot,
                       GemmScratch* scratch) {
  PanelBlock block;
  block.elements = Elements(w, panel, k0, kn, scratch->elements[slot]);
  uint8_t* scales = scratch->scale_bytes[slot];
  block.scales = scales;
  if (w.format == WeightFormat::kFp8Block128) {
    Fp8Scales(w, panel, k0, scales);
  } else if (IsFp4(w.format)) {
    const int64_t group = ScaleGroup(w.format);
    const int64_t row_groups = w.cols / group;
    const uint8_t* base = w.scales + panel * kPanelRows * row_groups;
    if (w.layout == WeightLayout::kPanels) {
      block.scales = base + k0 / group * kPanelRows;
    } else {
      const int64_t rows = std::min(kPanelRows, w.rows - panel * kPanelRows);
      Transpose<uint8_t>(base, row_groups, rows, k0 / group, kn / group, scales);
    }
  }
  return block;
}

}  // namespace isthmus::kernels
