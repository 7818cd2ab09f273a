// SPDX-License-Identifier: Apache-2.0
#include "kernels/all_gather/all_gather.h"

#include "absl/strings/str_cat.h"
#include "kernels/all_gather/all_gather_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

bool HasSlots(const AllGatherCall& call) { return call.group.has_slots(); }

constexpr AllGatherVariant kVariants[] = {
    {nullptr, kAnyCuda, HasSlots, LaunchAllGatherPeers},
    {nullptr, kCpuOnly, HasSlots, LaunchAllGatherCpu},
};

}  // namespace

absl::Status ValidateAllGather(const AllGatherArgs& args, const Communicator& group) {
  const MatrixView& m = args.values;
  if (m.dtype != DType::kF32 && m.dtype != DType::kI32) {
    return absl::InvalidArgumentError(absl::StrCat("all_gather: values have type ",
                                                   static_cast<int>(m.dtype),
                                                   ", expected f32 (0) or i32 (8)"));
  }
  if (m.rows < 0 || m.cols < 0 || (m.rows > 1 && m.row_stride < m.cols) ||
      (m.data == nullptr && m.rows * m.cols != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("all_gather: values are [", m.rows, ", ", m.cols,
                                                   "] with row stride ", m.row_stride,
                                                   m.data == nullptr ? " and no data" : ""));
  }
  if (group.ranks < 1 || group.ranks > kMaxRanks || group.rank < 0 || group.rank >= group.ranks) {
    return absl::InvalidArgumentError(absl::StrCat("all_gather: rank ", group.rank, " of ",
                                                   group.ranks, ", at most ", kMaxRanks));
  }
  if (group.has_slots() && 4 * m.cols > group.slot_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "all_gather: a row has ", 4 * m.cols, " bytes, a slot of the group ", group.slot_bytes));
  }
  return absl::OkStatus();
}

std::span<const AllGatherVariant> AllGatherVariants() { return kVariants; }

absl::Status AllGather(const AllGatherArgs& args, const Exec& exec) {
  static constexpr Communicator kAlone;
  const Communicator& group = exec.communicator != nullptr ? *exec.communicator : kAlone;
  ISTHMUS_RETURN_IF_ERROR(ValidateAllGather(args, group));
  if (group.ranks == 1 || args.values.rows * args.values.cols == 0) return absl::OkStatus();
  const AllGatherCall call = {args, group};
  ISTHMUS_ASSIGN_OR_RETURN(const AllGatherVariant* variant,
                           Choose(AllGatherVariants(), call, exec));
  return variant->launch(call, exec);
}

}  // namespace isthmus::kernels
