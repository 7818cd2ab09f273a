// SPDX-License-Identifier: Apache-2.0
// Patch experts.grouped_w4a8 on sm_120a, whose mma.sync multiplies e4m3 as it is, and patch
// experts.grouped_mxf8f6f4: the same with the block-scaled tensor cores, which read fp4 codes as
// they are and apply both scales: a fifth of the work around each product.
//
// Bound by memory as experts_grouped.cu is. Never run on a GPU of ours: the emulator has the
// instruction.
#include "kernels/experts/experts_variants.h"
#include "kernels/experts/grouped_products.cuh"

namespace isthmus::kernels {

absl::Status LaunchExpertsGroupedW4A8Sm120(const ExpertsArgs& args, const Exec& exec) {
  using grouped::MmaKind;
  using grouped::ProductKind;
  return grouped::RunGrouped(args, exec, grouped::RowKind::kE4m3,
                             grouped::LaunchProduct<MmaKind::kE4m3, ProductKind::kGate>,
                             grouped::LaunchProduct<MmaKind::kE4m3, ProductKind::kDown>);
}

absl::Status LaunchExpertsGroupedMxf8f6f4(const ExpertsArgs& args, const Exec& exec) {
  using grouped::MmaKind;
  using grouped::ProductKind;
  return grouped::RunGrouped(args, exec, grouped::RowKind::kE4m3,
                             grouped::LaunchProduct<MmaKind::kBlockScaled, ProductKind::kGate>,
                             grouped::LaunchProduct<MmaKind::kBlockScaled, ProductKind::kDown>);
}

}  // namespace isthmus::kernels
