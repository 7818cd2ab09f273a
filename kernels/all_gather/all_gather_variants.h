// SPDX-License-Identifier: Apache-2.0
// The variants of all_gather: internal to this folder and its tests.
#pragma once

#include <algorithm>
#include <span>

#include "kernels/all_gather/all_gather.h"
#include "kernels/core/choose.h"
#include "kernels/core/communicator.h"

namespace isthmus::kernels {

struct AllGatherCall {
  const AllGatherArgs& args;
  const Communicator& group;
};

struct AllGatherVariant {
  const Patch* patch = nullptr;
  ArchRange arches;
  bool (*supports)(const AllGatherCall&) = nullptr;
  absl::Status (*launch)(const AllGatherCall&, const Exec&) = nullptr;
};

std::span<const AllGatherVariant> AllGatherVariants();
absl::Status ValidateAllGather(const AllGatherArgs& args, const Communicator& group);

// Rows of the longest part, and how many of them go at once.
struct GatherPieces {
  int64_t rows = 0;
  int64_t step = 1;
};
inline GatherPieces PiecesOf(const AllGatherCall& call) {
  const MatrixView& values = call.args.values;
  return {RowsOf(values.rows, 0, call.group.ranks).count,
          std::max<int64_t>(1, call.group.slot_bytes / std::max<int64_t>(1, 4 * values.cols))};
}
// Rows [begin, begin + step) of a rank's part, as far as it has them, counted from the whole.
constexpr RowRange PieceOf(const RowRange& part, int64_t begin, int64_t step) {
  const int64_t left = part.count - begin;
  return {part.first + begin, left < 0 ? 0 : (left < step ? left : step)};
}

absl::Status LaunchAllGatherCpu(const AllGatherCall& call, const Exec& exec);
#if ISTHMUS_HAS_CUDA
absl::Status LaunchAllGatherPeers(const AllGatherCall& call, const Exec& exec);
#else
// NOLINTNEXTLINE(readability-identifier-naming): a launcher that is not compiled in.
inline constexpr decltype(AllGatherVariant::launch) LaunchAllGatherPeers = nullptr;
#endif

}  // namespace isthmus::kernels
