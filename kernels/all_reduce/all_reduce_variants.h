// SPDX-License-Identifier: Apache-2.0
// The variants of all_reduce: internal to this folder and its tests.
#pragma once

#include <span>

#include "kernels/all_reduce/all_reduce.h"
#include "kernels/core/choose.h"

namespace isthmus::kernels {

// What a variant is chosen by: the group decides as well as the shape.
struct AllReduceCall {
  const AllReduceArgs& args;
  const Communicator& group;
};

struct AllReduceVariant {
  const Patch* patch = nullptr;  // Null: the trusted path of its architectures.
  ArchRange arches;
  bool (*supports)(const AllReduceCall&) = nullptr;  // Null: every valid call.
  absl::Status (*launch)(const AllReduceCall&, const Exec&) = nullptr;
};

// Fastest first within an architecture; each architecture ends in its trusted paths: NCCL where the
// group has it, else memory that all ranks reach.
std::span<const AllReduceVariant> AllReduceVariants();

// exec.communicator, or a group of one.
const Communicator& GroupOf(const Exec& exec);
absl::Status ValidateAllReduce(const AllReduceArgs& args, const Communicator& group);

// Bytes of `rows` rows on the wire.
inline int64_t WireBytes(const AllReduceArgs& args, int64_t rows) {
  return rows * args.x.cols * (args.wire == DType::kF32 ? 4 : 2);
}
// Rows that fit into a slot; at least one (validated).
inline int64_t RowsPerSlot(const AllReduceCall& call) {
  const int64_t row_bytes = WireBytes(call.args, 1);
  return row_bytes == 0 ? call.args.x.rows : call.group.slot_bytes / row_bytes;
}
// What the one-shot kernel takes: all rows in one slot, vectors of 16 bytes.
bool FitsOneShot(const AllReduceCall& call);
// Blocks of its grid for so many vectors of 16 bytes: the same on every rank.
int64_t OneShotBlocks(int64_t vectors);
inline constexpr int kOneShotThreads = 512;

absl::Status LaunchAllReduceCpu(const AllReduceCall& call, const Exec& exec);
#if ISTHMUS_HAS_CUDA
absl::Status LaunchAllReducePeers(const AllReduceCall& call, const Exec& exec);
absl::Status LaunchAllReduceOneShot(const AllReduceCall& call, const Exec& exec);
// Parts of the NCCL path: x as `wire` in a contiguous buffer, and a buffer of sums to out.
absl::Status LaunchToWire(const AllReduceArgs& args, void* wire, const Exec& exec);
absl::Status LaunchFromWire(const AllReduceArgs& args, const void* wire, const Exec& exec);
#else
// NOLINTBEGIN(readability-identifier-naming): launchers that are not compiled in.
inline constexpr decltype(AllReduceVariant::launch) LaunchAllReducePeers = nullptr;
inline constexpr decltype(AllReduceVariant::launch) LaunchAllReduceOneShot = nullptr;
// NOLINTEND(readability-identifier-naming)
#endif
#if ISTHMUS_HAS_NCCL
absl::Status LaunchAllReduceNccl(const AllReduceCall& call, const Exec& exec);
#else
// NOLINTNEXTLINE(readability-identifier-naming)
inline constexpr decltype(AllReduceVariant::launch) LaunchAllReduceNccl = nullptr;
#endif

}  // namespace isthmus::kernels
