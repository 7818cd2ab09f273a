// SPDX-License-Identifier: Apache-2.0
// Sum over the ranks of a tensor-parallel group:
//
//   out[t, d] = round( wire(x_0[t, d]) + wire(x_1[t, d]) + … )     x_r: the x of rank r
//
// Called by every rank, in the same order and with the same shapes and options. The group is
// exec.communicator; none is a group of one rank, for which wire is the identity.
//
// Shapes     x, out: [tokens, hidden].
// Types      x, out: f32. wire: f32 (the identity) or bf16 (half the bytes on the link).
// Layout     Rows may be strided.
// Aliasing   out may be x. Nothing else may overlap.
// Numerics   Over peer memory and on the CPU: f32 sums in ascending rank. NCCL adds in an order of
//            its own and, with a bf16 wire, in its own precision; so variants may differ from each
//            other, but within one variant every rank has the same bits, on every run. round is to
//            bf16 when round_output is set, else nothing.
// Workspace  Peer memory: none. NCCL: tokens * hidden elements of wire, and as many again when out
//            is not a contiguous buffer of that type.
// Phases     Prefill, decode. May be captured in a graph; replays go on where the last call ended.
// Errors     InvalidArgument   A shape, type or stride breaks this contract.
//            DeadlineExceeded  CPU: a rank did not come within the group's timeout. On a GPU its
//                              peers trap after having written the group's fault
//                              (PeerGroup::Fault).
//            Unimplemented     No enabled variant supports this architecture and group.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "kernels/core/communicator.h"
#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

struct AllReduceArgs {
  MatrixView x;    // [tokens, hidden]
  MatrixView out;  // [tokens, hidden]; may be x
  DType wire = DType::kF32;
  bool round_output = false;
};

absl::Status AllReduce(const AllReduceArgs& args, const Exec& exec);
// Over the x of all ranks, [ranks]: no communicator is needed.
absl::Status AllReduceDefinition(std::span<const AllReduceArgs> ranks);

std::span<const Patch* const> AllReducePatches();

}  // namespace isthmus::kernels
