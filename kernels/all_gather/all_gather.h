// SPDX-License-Identifier: Apache-2.0
// Rows that the ranks of a tensor-parallel group have computed, put together on every rank:
//
//   values[t, :] on every rank = values[t, :] of the rank that owns row t
//
// Rank r of n owns RowsOf(rows, r, n). Called by every rank, in the same order and with the same
// shapes. The group is exec.communicator; without one, or with one rank, nothing happens.
//
// Shapes     values: [rows, cols], in place.
// Types      f32 or i32: words of four bytes, copied as they are.
// Layout     Rows may be strided.
// Aliasing   None.
// Numerics   The owner's bits.
// Workspace  None. What does not fit into the group's slots goes in pieces.
// Phases     Prefill: the entries that the indexer has chosen, cut by query rows.
// Errors     InvalidArgument   A shape, type or stride breaks this contract.
//            DeadlineExceeded  CPU: a rank did not come within the group's timeout. On a GPU its
//                              peers trap after having written the group's fault.
//            Unimplemented     No variant supports this architecture, or the group has no slots.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

// Contiguous, at most one row more or less than the others; the first ranks have the longer parts.
struct RowRange {
  int64_t first = 0;
  int64_t count = 0;
};
constexpr RowRange RowsOf(int64_t rows, int rank, int ranks) {
  const int64_t share = rows / ranks;
  const int64_t longer = rows % ranks;
  return {rank * share + (rank < longer ? rank : longer), share + (rank < longer ? 1 : 0)};
}

struct AllGatherArgs {
  MatrixView values;  // [rows, cols], f32 or i32
};

absl::Status AllGather(const AllGatherArgs& args, const Exec& exec);

}  // namespace isthmus::kernels
