// SPDX-License-Identifier: Apache-2.0
#include "services/model/weight_packing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstring>

#include "kernels/core/pack.h"
#include "services/base/check.h"

namespace isthmus::model {
namespace {

using kernels::IsFp4;
using kernels::ScaleGroup;
using kernels::WeightFormat;
using kernels::WeightView;

constexpr int kNotAPower = 127;  // Larger than any log2 of an e4m3 value.
constexpr int kUe8m0Bias = 127;
constexpr uint8_t kUe8m0Nan = 255;

constexpr int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

// log2 of every positive power of two among the e4m3 values, kNotAPower for the other codes.
constexpr std::array<int, 256> E4m3Log2() {
  std::array<int, 256> out{};
  out.fill(kNotAPower);
  out[1] = -9;  // Subnormals: code * 2^-9.
  out[2] = -8;
  out[4] = -7;
  for (size_t exponent = 1; exponent < 16; ++exponent) {
    out[exponent * 8] = static_cast<int>(exponent) - 7;
  }
  return out;
}
constexpr std::array<int, 256> kE4m3Log2 = E4m3Log2();

// log2 of a positive power of two, subnormals included.
std::optional<int> Log2OfPower(float x) {
  int exponent = 0;
  if (!(x > 0.0f) || !std::isfinite(x) || std::frexp(x, &exponent) != 0.5f) return std::nullopt;
  return exponent - 1;
}

// The ue8m0 byte that two neighbouring e4m3 scales and 2^global_log2 amount to; kUe8m0Nan when
// there is none.
uint8_t CastScale(uint8_t low, uint8_t high, int global_log2) {
  const int log2 = kE4m3Log2[low];
  if (low != high || log2 == kNotAPower) return kUe8m0Nan;
  const int biased = log2 + global_log2 + kUe8m0Bias;
  return biased >= 0 && biased < kUe8m0Nan ? static_cast<uint8_t>(biased) : kUe8m0Nan;
}

bool IsNanScale(WeightFormat format, uint8_t byte) {
  return format == WeightFormat::kNvfp4 ? (byte & 0x7f) == 0x7f : byte == kUe8m0Nan;
}

// Notes the first NaN among `count` scales of `row`.
void FindNan(const WeightView& w, const uint8_t* scales, int64_t row, int64_t count,
             ScaleFindings* out) {
  for (int64_t i = 0; i < count && !out->nan_at; ++i) {
    if (!IsNanScale(w.format, scales[i])) continue;
    out->nan_at = {row, i};
    out->nan_byte = scales[i];
  }
}

}  // namespace

int64_t CopiedElementBytes(const WeightView& w) { return kernels::PackedElementBytes(w); }

int64_t CopiedScaleBytes(const WeightView& w) {
  if (w.format != WeightFormat::kFp8Block128) return kernels::PackedScaleBytes(w);
  return CeilDivide(w.rows, 128) * CeilDivide(w.cols, 128);
}

WeightView CopyToPanels(const WeightView& w, uint8_t* elements, uint8_t* scales) {
  ISTHMUS_CHECK(w.first_row == 0);  // A slice would need part of the block scales.
  WeightView out = kernels::PackWeight(w, reinterpret_cast<std::byte*>(elements), scales);
  if (w.format == WeightFormat::kFp8Block128) {
    std::memcpy(scales, w.scales, static_cast<size_t>(CopiedScaleBytes(w)));
    out.scales = scales;
  }
  return out;
}

ScaleFindings InspectScales(const WeightView& w, bool only_sample) {
  ScaleFindings out;
  if (w.format == WeightFormat::kFp8Block128) {
    const int64_t columns = CeilDivide(w.cols, 128);
    for (int64_t row = 0; row < CeilDivide(w.rows, 128); ++row) {
      FindNan(w, w.scales + row * columns, row, columns, &out);
    }
    return out;
  }
  if (!IsFp4(w.format)) return out;
  const int64_t columns = w.cols / ScaleGroup(w.format);
  const std::optional<int> global_log2 = Log2OfPower(w.global_scale);
  out.is_mxfp4_cast = w.format == WeightFormat::kNvfp4 && global_log2.has_value();
  const int64_t step = only_sample ? std::max<int64_t>(1, w.rows / 2) : 1;
  const int64_t end = only_sample ? std::min<int64_t>(w.rows, step + 1) : w.rows;
  for (int64_t row = 0; row < end; row += step) {
    const uint8_t* scales = w.scales + row * columns;
    FindNan(w, scales, row, columns, &out);
    for (int64_t i = 0; out.is_mxfp4_cast && i + 1 < columns; i += 2) {
      out.is_mxfp4_cast = CastScale(scales[i], scales[i + 1], *global_log2) != kUe8m0Nan;
    }
  }
  return out;
}

WeightView RebuildMxfp4(const WeightView& w, uint8_t* scales) {
  const std::optional<int> global_log2 = Log2OfPower(w.global_scale);
  ISTHMUS_CHECK(w.format == WeightFormat::kNvfp4 && global_log2.has_value());
  const int64_t count = w.rows * (w.cols / 32);
  for (int64_t i = 0; i < count; ++i) {
    scales[i] = CastScale(w.scales[2 * i], w.scales[2 * i + 1], *global_log2);
    ISTHMUS_CHECK(scales[i] != kUe8m0Nan);
  }
  WeightView out = w;
  out.format = WeightFormat::kMxfp4;
  out.scales = scales;
  out.global_scale = 1.0f;
  return out;
}

}  // namespace isthmus::model
