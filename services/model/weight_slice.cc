// SPDX-License-Identifier: Apache-2.0
#include "services/model/weight_slice.h"

#include <cstring>

#include "services/base/check.h"

namespace isthmus::model {
namespace {

using kernels::IsFp4;
using kernels::ScaleGroup;
using kernels::WeightFormat;
using kernels::WeightView;

constexpr int64_t kFp8Block = 128;

// Bytes of `cols` elements of one row.
int64_t RowBytes(WeightFormat format, int64_t cols) {
  switch (format) {
    case WeightFormat::kF32:
      return 4 * cols;
    case WeightFormat::kBf16:
      return 2 * cols;
    case WeightFormat::kFp8Block128:
      return cols;
    default:
      return cols / 2;
  }
}

// The scales under a slice: rows and columns of the stored scales, counted from w.scales.
struct ScaleSlice {
  ScaleRange rows;
  ScaleRange cols;
};

ScaleSlice ScalesUnder(const WeightView& w, const Range& rows, const Range& cols) {
  const int64_t group = ScaleGroup(w.format);
  if (group == 0) return {};
  const Range stored_cols = {w.first_col + cols.first, cols.count};
  if (IsFp4(w.format)) return {{rows, 0}, ScaleBlocksUnder(stored_cols, group)};
  const Range stored_rows = {w.first_row + rows.first, rows.count};
  return {ScaleBlocksUnder(stored_rows, kFp8Block), ScaleBlocksUnder(stored_cols, group)};
}

void CopyRectangle(const uint8_t* from, int64_t from_stride, int64_t rows, int64_t row_bytes,
                   uint8_t* to) {
  if (from_stride == row_bytes) {
    std::memcpy(to, from, static_cast<size_t>(rows * row_bytes));
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    std::memcpy(to + i * row_bytes, from + i * from_stride, static_cast<size_t>(row_bytes));
  }
}

}  // namespace

int64_t SliceElementBytes(const WeightView& w, const Range& rows, const Range& cols) {
  return rows.count * RowBytes(w.format, cols.count);
}

int64_t SliceScaleBytes(const WeightView& w, const Range& rows, const Range& cols) {
  const ScaleSlice under = ScalesUnder(w, rows, cols);
  return under.rows.blocks.count * under.cols.blocks.count;
}

WeightView CopySlice(const WeightView& w, const Range& rows, const Range& cols, uint8_t* elements,
                     uint8_t* scales) {
  ISTHMUS_CHECK(w.layout == kernels::WeightLayout::kRowMajor);
  ISTHMUS_CHECK(rows.first >= 0 && rows.count >= 0 && rows.end() <= w.rows);
  ISTHMUS_CHECK(cols.first >= 0 && cols.count >= 0 && cols.end() <= w.cols);
  const int64_t group = ScaleGroup(w.format);
  // A cast is summed in pairs of its groups, which must stay together.
  const int64_t unit = w.is_mxfp4_cast ? 2 * group : group;
  ISTHMUS_CHECK(!IsFp4(w.format) || (cols.first % unit == 0 && cols.count % unit == 0));

  WeightView out = w;
  out.rows = rows.count;
  out.cols = cols.count;
  out.first_row = 0;
  out.first_col = 0;
  out.elements = elements;
  CopyRectangle(static_cast<const uint8_t*>(w.elements) + rows.first * RowBytes(w.format, w.cols) +
                    RowBytes(w.format, cols.first),
                RowBytes(w.format, w.cols), rows.count, RowBytes(w.format, cols.count), elements);
  if (group == 0) return out;
  const ScaleSlice under = ScalesUnder(w, rows, cols);
  const int64_t stored_columns = kernels::ScaleColumns(w);
  CopyRectangle(w.scales + under.rows.blocks.first * stored_columns + under.cols.blocks.first,
                stored_columns, under.rows.blocks.count, under.cols.blocks.count, scales);
  out.scales = scales;
  out.first_row = under.rows.offset;
  // Inside one block it does not matter where.
  out.first_col = under.cols.blocks.count > 1 ? under.cols.offset : 0;
  ISTHMUS_CHECK(out.first_col % 32 == 0);
  return out;
}

}  // namespace isthmus::model
