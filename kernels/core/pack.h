// SPDX-License-Identifier: Apache-2.0
// Repacks a stored weight into the panels of weight.h, once, at load. Both layouts give the same
// bits; panels are read as they lie, rows must be transposed on the way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/core/weight.h"

namespace isthmus::kernels {

// Bytes of the elements in kPanels layout, including the zero rows that fill the last panel.
int64_t PackedElementBytes(const WeightView& w);
// Bytes of the repacked scales; 0 when the format's scales are used as stored (fp8) or absent.
int64_t PackedScaleBytes(const WeightView& w);

// Writes the panels of `row_major` to `elements_out` (PackedElementBytes) and `scales_out`
// (PackedScaleBytes; may be null when that is 0) and returns the view of the result: the fp4 scales
// are `scales_out`, the fp8 scales stay those of `row_major`. The view owns nothing.
// Checked: layout is kRowMajor; fp4 columns fill whole scale groups; the outputs are aligned to the
// element (4 bytes for kF32, 2 for kBf16), better to 64 bytes.
WeightView PackWeight(const WeightView& row_major, std::byte* elements_out, uint8_t* scales_out);

}  // namespace isthmus::kernels
