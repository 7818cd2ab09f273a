// SPDX-License-Identifier: Apache-2.0
// A weight matrix [rows = outputs N, cols = inputs K] at its stored width, as the GEMM reads it.
//
// Formats (model specification 2.7, 6.1, 6.3), value of element (n, k):
//   kF32, kBf16   the element
//   kFp8Block128  fp8_e4m3 * ue8m0[(first_row + n) / 128][(first_col + k) / 128]
//   kMxfp4        fp4_e2m1 * ue8m0[n][k / 32]
//   kNvfp4        fp4_e2m1 * fp8_e4m3[n][k / 16] * global_scale
// fp4 pairs: the low nibble is the even k.
//
// Layouts. kRowMajor is the file's: elements [N][K], fp4 scales [N][K / group]. kPanels groups 16
// outputs, so that a vector register holds one k of 16 outputs:
//   elements  [ceil(N / 16)][K][16]            (fp4: [ceil(N / 16)][K / 2][16] bytes, each holding
//                                               two consecutive k of one output)
//   fp4 scales [ceil(N / 16)][K / group][16]   (bytes as stored)
// kMmaTiles is a GPU's (weight_tiles.h): tiles of 16 outputs in the order of mma.sync's A fragment,
// fp4 scales inside the tile. kMmaTilesF16 is the same for fp4 on tensor cores that multiply f16,
// not e4m3 (sm_90): only the bits of a word of eight codes lie otherwise.
// Rows beyond N are zero bytes. fp8 block scales keep the file's layout in both:
// [ceil((first_row + N) / 128)][ceil((first_col + K) / 128)]. On the CPU both give the
// same bits.
//
// A share of a matrix that is cut inside a block of 128 keeps the scale of the whole block, as does
// its neighbour: first_row and first_col say how far inside the block the share begins. Whoever
// reads fp8 scales counts from there (ScaleColumns, ScaleColumn); a kernel that cannot must refuse
// first_col != 0 in its `supports`. It is a multiple of 32, so that no k32 step of an mma has two
// scales. fp4 matrices are never cut inside a group.
#pragma once

#include <cstdint>

#include "kernels/core/host_device.h"
#include "services/base/check.h"

namespace isthmus::kernels {

enum class WeightFormat : uint8_t { kF32, kBf16, kFp8Block128, kMxfp4, kNvfp4 };
enum class WeightLayout : uint8_t { kRowMajor, kPanels, kMmaTiles, kMmaTilesF16 };
ISTHMUS_HOST_DEVICE inline bool IsTiled(WeightLayout layout) {
  return layout == WeightLayout::kMmaTiles || layout == WeightLayout::kMmaTilesF16;
}

inline constexpr int64_t kPanelRows = 16;  // And of a row of tiles.

// Tiles: bytes from one to the next, and the inputs that one holds (weight_tiles.h).
ISTHMUS_HOST_DEVICE inline int64_t TileBytes(WeightFormat format) {
  return format == WeightFormat::kMxfp4 ? 544 : format == WeightFormat::kNvfp4 ? 576 : 512;
}
ISTHMUS_HOST_DEVICE inline int64_t TileCols(WeightFormat format) {
  if (format == WeightFormat::kF32) return 8;
  if (format == WeightFormat::kBf16) return 16;
  return format == WeightFormat::kFp8Block128 ? 32 : 64;
}

struct WeightView {
  WeightFormat format = WeightFormat::kF32;
  WeightLayout layout = WeightLayout::kRowMajor;
  int64_t rows = 0;  // N, outputs.
  int64_t cols = 0;  // K, inputs.
  const void* elements = nullptr;
  const uint8_t* scales = nullptr;  // Null for kF32 and kBf16.
  float global_scale = 1.0f;        // kNvfp4: weight_scale_2.
  int64_t first_row = 0;            // Row of the stored matrix that row 0 is (fp8 scale blocks).
  int64_t first_col = 0;            // Its column, from the first scale block on: 0, 32, 64 or 96.

  // kNvfp4 only: the matrix was verified to be a lossless cast of MXFP4 (specification 6.3), so it
  // is summed in groups of 32 like kMxfp4 and gives that format's bits.
  bool is_mxfp4_cast = false;
};

ISTHMUS_HOST_DEVICE inline bool IsFp4(WeightFormat format) {
  return format == WeightFormat::kMxfp4 || format == WeightFormat::kNvfp4;
}
// Elements along K under one stored scale; 0 when the format has none.
ISTHMUS_HOST_DEVICE inline int64_t ScaleGroup(WeightFormat format) {
  switch (format) {
    case WeightFormat::kFp8Block128:
      return 128;
    case WeightFormat::kMxfp4:
      return 32;
    case WeightFormat::kNvfp4:
      return 16;
    default:
      return 0;
  }
}
// Scales stored in one row of blocks or groups; 0 when the format has none.
ISTHMUS_HOST_DEVICE inline int64_t ScaleColumns(const WeightView& w) {
  const int64_t group = ScaleGroup(w.format);
  return group == 0 ? 0 : (w.first_col + w.cols + group - 1) / group;
}
// The one of them that input k has. The format has scales.
ISTHMUS_HOST_DEVICE inline int64_t ScaleColumn(const WeightView& w, int64_t k) {
  return (w.first_col + k) / ScaleGroup(w.format);
}
// Elements along K that are summed before the scale is applied (kernels/core/gemm.h).
ISTHMUS_HOST_DEVICE inline int64_t SumGroup(const WeightView& w) {
  switch (w.format) {
    case WeightFormat::kMxfp4:
      return 32;
    case WeightFormat::kNvfp4:
      return w.is_mxfp4_cast ? 32 : 16;
    default:
      return 128;
  }
}
// True when the reference arithmetic quantises the input of this linear (specification 2.7).
ISTHMUS_HOST_DEVICE inline bool QuantisesInput(WeightFormat format) {
  return ScaleGroup(format) != 0;
}

// Rows [first, first + count): a group of wo_a, an expert's share. In panels and tiles, `first`
// must be a multiple of kPanelRows.
inline WeightView RowSlice(const WeightView& w, int64_t first, int64_t count) {
  ISTHMUS_CHECK(first >= 0 && count >= 0 && first + count <= w.rows);
  ISTHMUS_CHECK(w.layout == WeightLayout::kRowMajor || first % kPanelRows == 0);
  WeightView out = w;
  out.rows = count;
  out.first_row = w.first_row + first;
  if (IsTiled(w.layout)) {
    const int64_t tiles = (w.cols + TileCols(w.format) - 1) / TileCols(w.format);
    out.elements =
        static_cast<const uint8_t*>(w.elements) + first / kPanelRows * tiles * TileBytes(w.format);
    return out;
  }
  int64_t row_bytes = 0;
  switch (w.format) {
    case WeightFormat::kF32:
      row_bytes = 4 * w.cols;
      break;
    case WeightFormat::kBf16:
      row_bytes = 2 * w.cols;
      break;
    case WeightFormat::kFp8Block128:
      row_bytes = w.cols;
      break;
    default:
      row_bytes = w.cols / 2;
  }
  out.elements = static_cast<const uint8_t*>(w.elements) + first * row_bytes;
  if (IsFp4(w.format)) out.scales = w.scales + first * (w.cols / ScaleGroup(w.format));
  return out;
}

}  // namespace isthmus::kernels
