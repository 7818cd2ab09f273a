// SPDX-License-Identifier: Apache-2.0
#include "kernels/core/pack.h"

#include <algorithm>
#include <cstring>

namespace isthmus::kernels {
namespace {

// out[panel][unit][16] = in[panel * 16 + i][unit] for units of a few bytes; rows beyond `rows` are
// zero. The input is a file mapped into memory and need not be aligned to its units.
template <typename Unit>
void PackUnits(const void* in, int64_t rows, int64_t units, Unit* out) {
  constexpr auto kUnitBytes = static_cast<int64_t>(sizeof(Unit));
  for (int64_t first = 0; first < rows; first += kPanelRows) {
    const int64_t count = std::min(kPanelRows, rows - first);
    Unit* panel = out + first * units;
    for (int64_t i = 0; i < count; ++i) {
      const auto* row = static_cast<const uint8_t*>(in) + (first + i) * units * kUnitBytes;
      for (int64_t u = 0; u < units; ++u) {
        std::memcpy(&panel[u * kPanelRows + i], row + u * kUnitBytes, sizeof(Unit));
      }
    }
    for (int64_t i = count; i < kPanelRows; ++i) {
      for (int64_t u = 0; u < units; ++u) panel[u * kPanelRows + i] = Unit{};
    }
  }
}

int64_t PaddedRows(const WeightView& w) {
  return (w.rows + kPanelRows - 1) / kPanelRows * kPanelRows;
}

}  // namespace

int64_t PackedElementBytes(const WeightView& w) {
  switch (w.format) {
    case WeightFormat::kF32:
      return PaddedRows(w) * w.cols * 4;
    case WeightFormat::kBf16:
      return PaddedRows(w) * w.cols * 2;
    case WeightFormat::kFp8Block128:
      return PaddedRows(w) * w.cols;
    default:
      return PaddedRows(w) * (w.cols / 2);
  }
}

int64_t PackedScaleBytes(const WeightView& w) {
  return IsFp4(w.format) ? PaddedRows(w) * (w.cols / ScaleGroup(w.format)) : 0;
}

WeightView PackWeight(const WeightView& row_major, std::byte* elements_out, uint8_t* scales_out) {
  const WeightView& w = row_major;
  ISTHMUS_CHECK(w.layout == WeightLayout::kRowMajor);
  WeightView packed = w;
  packed.layout = WeightLayout::kPanels;
  packed.elements = elements_out;
  switch (w.format) {
    case WeightFormat::kF32:
      PackUnits(w.elements, w.rows, w.cols, reinterpret_cast<uint32_t*>(elements_out));
      break;
    case WeightFormat::kBf16:
      PackUnits(w.elements, w.rows, w.cols, reinterpret_cast<uint16_t*>(elements_out));
      break;
    case WeightFormat::kFp8Block128:
      PackUnits(w.elements, w.rows, w.cols, reinterpret_cast<uint8_t*>(elements_out));
      break;
    default:
      ISTHMUS_CHECK(w.cols % ScaleGroup(w.format) == 0);
      PackUnits(w.elements, w.rows, w.cols / 2, reinterpret_cast<uint8_t*>(elements_out));
      PackUnits(w.scales, w.rows, w.cols / ScaleGroup(w.format), scales_out);
      packed.scales = scales_out;
  }
  return packed;
}

}  // namespace isthmus::kernels
