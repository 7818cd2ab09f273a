// SPDX-License-Identifier: Apache-2.0
// From the file's layout to the one the GEMM reads (kernels/core/weight.h), and the test for NVFP4
// that is MXFP4 in disguise (model specification 6.3).
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "kernels/core/weight.h"

namespace isthmus::model {

// Bytes that a kPanels copy of `w` (kRowMajor) takes: its elements, padding rows included, and its
// scales, those of fp8 blocks (which keep the file's layout) among them.
int64_t CopiedElementBytes(const kernels::WeightView& w);
int64_t CopiedScaleBytes(const kernels::WeightView& w);

// Writes that copy; `elements` and `scales` have the sizes above and are aligned to 64 bytes.
// Returns a view that no longer refers to the memory of `w`.
kernels::WeightView CopyToPanels(const kernels::WeightView& w, uint8_t* elements, uint8_t* scales);

// What the scales of some rows of a matrix say.
struct ScaleFindings {
  // Where a NaN scale stands: row and column of the scale tensor.
  std::optional<std::pair<int64_t, int64_t>> nan_at;
  uint8_t nan_byte = 0;
  // kNvfp4 only: every scale passes the test of specification 6.3, so that ue8m0 scales exist that
  // give the same values. Power-of-two subnormals (2^-7 to 2^-9) pass as well: their value, not
  // their mantissa field, decides.
  bool is_mxfp4_cast = false;
};

// Reads all scales of `w` (kRowMajor), or, with `only_sample`, those of its first and middle rows.
// fp8 block scales are always read in full. kF32 and kBf16 have none.
ScaleFindings InspectScales(const kernels::WeightView& w, bool only_sample);

// Writes the [N][K / 32] ue8m0 scales of a kNvfp4 matrix for which InspectScales found a cast in
// all rows, and returns the kMxfp4 view (kRowMajor) that shares its elements. Exact.
kernels::WeightView RebuildMxfp4(const kernels::WeightView& w, uint8_t* scales);

}  // namespace isthmus::model
