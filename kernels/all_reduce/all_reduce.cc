// SPDX-License-Identifier: Apache-2.0
#include "kernels/all_reduce/all_reduce.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kernels/all_reduce/all_reduce_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr Patch kOneShot = {
    .name = "all_reduce.one_shot",
    .summary =
        "One kernel publishes a rank's part, meets the others under flags in peer memory and adds "
        "up theirs, so that a decode step pays one short launch instead of NCCL's protocol.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = false,
    .bound = {NumericClass::kReordered, /*factor=*/1.5, /*floor=*/1e-7},
    .test = "AllReduceVariantTest",
    .decision = "kernels/all_reduce/decisions/0001-one-shot-over-peer-memory.md"};

constexpr const Patch* kPatches[] = {&kOneShot};

bool HasNccl(const AllReduceCall& call) {
  return call.group.ranks > 1 && call.group.nccl != nullptr;
}

bool HasSlots(const AllReduceCall& call) { return call.group.ranks == 1 || call.group.has_slots(); }

// Fastest first within an architecture; each architecture ends in its trusted paths.
constexpr AllReduceVariant kVariants[] = {
    {&kOneShot, kAnyCuda, FitsOneShot, LaunchAllReduceOneShot},
    {nullptr, kAnyCuda, HasNccl, LaunchAllReduceNccl},
    {nullptr, kAnyCuda, HasSlots, LaunchAllReducePeers},  // Three plain kernels.
    {nullptr, kCpuOnly, HasSlots, LaunchAllReduceCpu},
};

absl::Status CheckMatrix(absl::string_view name, const MatrixView& m, const MatrixView& x) {
  if (m.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat(
        "all_reduce: ", name, " has type ", static_cast<int>(m.dtype), ", expected f32 (0)"));
  }
  if (m.rows != x.rows || m.cols != x.cols || m.rows < 0 || m.cols < 0 ||
      (m.rows > 1 && m.row_stride < m.cols)) {
    return absl::InvalidArgumentError(absl::StrCat("all_reduce: ", name, " is [", m.rows, ", ",
                                                   m.cols, "] with row stride ", m.row_stride,
                                                   ", x is [", x.rows, ", ", x.cols, "]"));
  }
  if (m.data == nullptr && m.rows * m.cols != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("all_reduce: ", name, " [", m.rows, ", ", m.cols, "] has no data"));
  }
  return absl::OkStatus();
}

}  // namespace

const Communicator& GroupOf(const Exec& exec) {
  static constexpr Communicator kAlone;
  return exec.communicator != nullptr ? *exec.communicator : kAlone;
}

bool FitsOneShot(const AllReduceCall& call) {
  const AllReduceArgs& args = call.args;
  const auto is_aligned = [](const MatrixView& m) {
    return reinterpret_cast<uintptr_t>(m.data) % 16 == 0 && m.row_stride % 4 == 0;
  };
  return call.group.ranks > 1 && call.group.has_slots() && args.x.cols % 8 == 0 &&
         is_aligned(args.x) && is_aligned(args.out) &&
         WireBytes(args, args.x.rows) <= call.group.slot_bytes;
}

int64_t OneShotBlocks(int64_t vectors) {
  constexpr int64_t kMostBlocks = 32;  // Eight ranks of them run at once on one device.
  static_assert(kMostBlocks <= kMaxMeetingBlocks);
  return std::clamp<int64_t>((vectors + kOneShotThreads - 1) / kOneShotThreads, 1, kMostBlocks);
}

absl::Status ValidateAllReduce(const AllReduceArgs& args, const Communicator& group) {
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("x", args.x, args.x));
  ISTHMUS_RETURN_IF_ERROR(CheckMatrix("out", args.out, args.x));
  if (args.wire != DType::kF32 && args.wire != DType::kBf16) {
    return absl::InvalidArgumentError(absl::StrCat("all_reduce: wire has type ",
                                                   static_cast<int>(args.wire),
                                                   ", expected f32 (0) or bf16 (2)"));
  }
  if (group.ranks < 1 || group.ranks > kMaxRanks || group.rank < 0 || group.rank >= group.ranks) {
    return absl::InvalidArgumentError(absl::StrCat("all_reduce: rank ", group.rank, " of ",
                                                   group.ranks, ", at most ", kMaxRanks));
  }
  if (group.ranks > 1 && group.nccl == nullptr && WireBytes(args, 1) > group.slot_bytes) {
    return absl::InvalidArgumentError(absl::StrCat("all_reduce: a row has ", WireBytes(args, 1),
                                                   " bytes on the wire, a slot of the group ",
                                                   group.slot_bytes));
  }
  return absl::OkStatus();
}

std::span<const AllReduceVariant> AllReduceVariants() { return kVariants; }
std::span<const Patch* const> AllReducePatches() { return kPatches; }

absl::Status AllReduce(const AllReduceArgs& args, const Exec& exec) {
  const AllReduceCall call = {args, GroupOf(exec)};
  ISTHMUS_RETURN_IF_ERROR(ValidateAllReduce(args, call.group));
  if (args.x.rows * args.x.cols == 0) return absl::OkStatus();  // The same on every rank.
  if (call.group.ranks == 1 && args.x.data == args.out.data && !args.round_output &&
      args.x.row_stride == args.out.row_stride) {
    return absl::OkStatus();
  }
  ISTHMUS_ASSIGN_OR_RETURN(const AllReduceVariant* variant,
                           Choose(AllReduceVariants(), call, exec));
  return variant->launch(call, exec);
}

}  // namespace isthmus::kernels
