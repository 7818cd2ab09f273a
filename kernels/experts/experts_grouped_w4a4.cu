// SPDX-License-Identifier: Apache-2.0
// Patch experts.grouped_w4a4: the products of experts.grouped_w4a8 with the rows of routed experts
// as NVFP4 too, multiplied k64 at a time by the block-scaled tensor cores of sm_120a
// (mma.sync kind::mxf4nvf4), twice as fast as rows of e4m3. The shared expert keeps those.
//
// Bound by memory as experts_grouped.cu is while tokens are few; where they are many, by the tensor
// cores, which is what it is for. Never run on a GPU of ours: the emulator has the instruction.
#include "kernels/experts/experts_variants.h"
#include "kernels/experts/grouped_products.cuh"

namespace isthmus::kernels {

absl::Status LaunchExpertsGroupedW4A4(const ExpertsArgs& args, const Exec& exec) {
  using grouped::MmaKind;
  using grouped::ProductKind;
  return grouped::RunGrouped(args, exec, grouped::RowKind::kFp4,
                             grouped::LaunchProduct<MmaKind::kFp4Rows, ProductKind::kGate>,
                             grouped::LaunchProduct<MmaKind::kFp4Rows, ProductKind::kDown>);
}

}  // namespace isthmus::kernels
