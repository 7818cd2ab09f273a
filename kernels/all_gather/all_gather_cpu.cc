// SPDX-License-Identifier: Apache-2.0
// Ranks as threads of one process, in host memory. The trusted CPU path.
#include <cstring>

#include "kernels/all_gather/all_gather_variants.h"
#include "kernels/core/peer_group.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

absl::Status GatherPiece(const AllGatherCall& call, int64_t begin, int64_t step) {
  const MatrixView& values = call.args.values;
  const Communicator& group = call.group;
  const auto row_bytes = static_cast<size_t>(4 * values.cols);
  const uint64_t number = *group.calls + 1;
  const auto piece_of = [&](int rank) {
    return PieceOf(RowsOf(values.rows, rank, group.ranks), begin, step);
  };
  const RowRange own = piece_of(group.rank);
  std::byte* to = PeerSlotOnHost(group, group.rank, number);
  for (int64_t t = 0; t < own.count; ++t) {
    std::memcpy(to + t * 4 * values.cols, values.f32(own.first + t), row_bytes);
  }
  ISTHMUS_RETURN_IF_ERROR(MeetPeersOnHost(group, number));
  for (int rank = 0; rank < group.ranks; ++rank) {
    if (rank == group.rank) continue;
    const RowRange piece = piece_of(rank);
    const std::byte* from = PeerSlotOnHost(group, rank, number);
    for (int64_t t = 0; t < piece.count; ++t) {
      std::memcpy(values.f32(piece.first + t), from + t * 4 * values.cols, row_bytes);
    }
  }
  *group.calls = number;
  return absl::OkStatus();
}

}  // namespace

absl::Status LaunchAllGatherCpu(const AllGatherCall& call, const Exec&) {
  const GatherPieces pieces = PiecesOf(call);
  for (int64_t begin = 0; begin < pieces.rows; begin += pieces.step) {
    ISTHMUS_RETURN_IF_ERROR(GatherPiece(call, begin, pieces.step));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
