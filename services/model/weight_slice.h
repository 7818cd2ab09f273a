// SPDX-License-Identifier: Apache-2.0
// Copies a rectangle out of a weight matrix, at its stored width and under the scales that it has.
#pragma once

#include <cstdint>

#include "kernels/core/weight.h"
#include "services/model/shard_plan.h"

namespace isthmus::model {

// Bytes of the copy of rows x cols of `w`: its elements, and the scales of every block or group
// that they touch, in part or in full.
int64_t SliceElementBytes(const kernels::WeightView& w, const Range& rows, const Range& cols);
int64_t SliceScaleBytes(const kernels::WeightView& w, const Range& rows, const Range& cols);

// Writes that copy and returns its view (kRowMajor), which refers to `elements` and `scales` alone.
// Value (n, k) of the copy is value (rows.first + n, cols.first + k) of `w`, bit for bit. Checked:
// `w` is kRowMajor, the ranges lie inside, fp4 columns are cut between groups, and fp8 columns that
// begin inside a block and leave it begin at a multiple of 32 in it.
kernels::WeightView CopySlice(const kernels::WeightView& w, const Range& rows, const Range& cols,
                              uint8_t* elements, uint8_t* scales);

}  // namespace isthmus::model
