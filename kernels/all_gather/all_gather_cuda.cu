// SPDX-License-Identifier: Apache-2.0
// All-gather over memory that all ranks reach: one kernel publishes the own rows, meets the peers
// and copies theirs. Any architecture.
//
// Bound by the link: each rank reads (ranks - 1) / ranks of the values.
#include "kernels/all_gather/all_gather_variants.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/peer.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocks = 32;  // Eight ranks of them run at once on one device.
static_assert(kBlocks <= kMaxMeetingBlocks);

// Grid: kBlocks, the same on every rank. Block: kThreads. Word i of a part is written and read by
// the block of the same number on all ranks.
__global__ __launch_bounds__(kThreads) void AllGatherPiece(
    uint32_t* values,  // [rows, cols], rows stride apart
    int64_t rows, int64_t cols, int64_t stride, int64_t begin, int64_t step,
    const __grid_constant__ Communicator group) {
  __shared__ unsigned shared_turn;
  const uint64_t call = PeerCall(group);
  const int64_t first = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  constexpr int64_t kStride = int64_t{kBlocks} * kThreads;

  const int64_t share = rows / group.ranks;
  const int64_t longer = rows % group.ranks;
  // Rows of `rank` in this piece: the first one, and their number.
  const auto first_of = [&](int rank) {
    return rank * share + (rank < longer ? rank : longer) + begin;
  };
  const auto count_of = [&](int rank) {
    const int64_t left = share + (rank < longer ? 1 : 0) - begin;
    return left < step ? left : step;  // May be negative: none.
  };

  auto* own = PeerSlot<uint32_t>(group, group.rank, call);
  uint32_t* own_rows = values + first_of(group.rank) * stride;
  for (int64_t i = first; i < count_of(group.rank) * cols; i += kStride) {
    own[i] = own_rows[i / cols * stride + i % cols];
  }
  MeetPeers(group, call, blockIdx.x);
  for (int peer = 0; peer < group.ranks; ++peer) {
    if (peer == group.rank) continue;
    const auto* theirs = PeerSlot<const volatile uint32_t>(group, peer, call);
    uint32_t* to = values + first_of(peer) * stride;
    for (int64_t i = first; i < count_of(peer) * cols; i += kStride) {
      to[i / cols * stride + i % cols] = theirs[i];
    }
  }
  EndPeerCall(group, call, kBlocks, &shared_turn);
}

}  // namespace

absl::Status LaunchAllGatherPeers(const AllGatherCall& call, const Exec& exec) {
  const MatrixView& values = call.args.values;
  const GatherPieces pieces = PiecesOf(call);
  LaunchShape shape;
  shape.grid = dim3(kBlocks);
  shape.block = dim3(kThreads);
  for (int64_t begin = 0; begin < pieces.rows; begin += pieces.step) {
    ISTHMUS_RETURN_IF_ERROR(Launch("AllGatherPiece", shape, exec, AllGatherPiece,
                                   static_cast<uint32_t*>(values.data), values.rows, values.cols,
                                   values.row_stride, begin, pieces.step, call.group));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
