// SPDX-License-Identifier: Apache-2.0
// The trusted path between devices: NCCL on exec.stream. Compiled where NCCL is found.
#include <nccl.h>

#include "absl/strings/str_cat.h"
#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/core/workspace.h"
#include "services/base/fault.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {

absl::Status LaunchAllReduceNccl(const AllReduceCall& call, const Exec& exec) {
  const AllReduceArgs& args = call.args;
  const int64_t count = args.x.rows * args.x.cols;
  const bool is_bf16 = args.wire == DType::kBf16;
  const auto is_contiguous = [](const MatrixView& m) {
    return m.rows == 1 || m.row_stride == m.cols;
  };
  Workspace::Scope scope(exec.workspace);
  const void* send = args.x.data;
  if (is_bf16 || !is_contiguous(args.x)) {
    void* wire = scope.Take<std::byte>(WireBytes(args, args.x.rows));
    ISTHMUS_RETURN_IF_ERROR(LaunchToWire(args, wire, exec));
    send = wire;
  }
  const bool is_direct = !is_bf16 && is_contiguous(args.out);
  void* receive = is_direct ? args.out.data : scope.Take<std::byte>(WireBytes(args, args.x.rows));
  const ncclResult_t result = ncclAllReduce(
      send, receive, static_cast<size_t>(count), is_bf16 ? ncclBfloat16 : ncclFloat32, ncclSum,
      static_cast<ncclComm_t>(call.group.nccl), static_cast<cudaStream_t>(exec.stream));
  if (result != ncclSuccess) {
    return WithFaultScope(
        absl::UnavailableError(absl::StrCat("all_reduce: NCCL on rank ", call.group.rank, " of ",
                                            call.group.ranks, ": ", ncclGetErrorString(result))),
        FaultScope::kDevice);
  }
  if (is_direct && !args.round_output) return absl::OkStatus();
  return LaunchFromWire(args, receive, exec);
}

}  // namespace isthmus::kernels
