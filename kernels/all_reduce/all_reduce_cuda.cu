// SPDX-License-Identifier: Apache-2.0
// All-reduce over memory that all ranks reach, in three plain kernels: publish, meet, add. Any
// architecture, any shape; what does not fit into a slot goes in pieces. The trusted path where
// there is no NCCL, such as several ranks on one device, and the elementwise parts of the NCCL
// path.
//
// Bound by launches and the meeting at decode sizes; by the link above: (ranks - 1) * bytes read.
#include <algorithm>

#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/peer.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1024;

// Element i of a buffer of f32 or bf16.
__device__ __forceinline__ float LoadWire(const void* wire, bool is_bf16, int64_t i) {
  if (!is_bf16) return static_cast<const float*>(wire)[i];
  return Bf16Value(static_cast<const uint16_t*>(wire)[i]);
}
__device__ __forceinline__ void StoreWire(void* wire, bool is_bf16, int64_t i, float value) {
  if (is_bf16) {
    static_cast<uint16_t*>(wire)[i] = Bf16Bits(value);
  } else {
    static_cast<float*>(wire)[i] = value;
  }
}

// Grid: any. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void AllReducePublish(
    const float* x,  // [rows, cols], rows x_stride apart
    int64_t rows, int64_t cols, int64_t x_stride, bool is_bf16,
    const __grid_constant__ Communicator group) {
  std::byte* slot = PeerSlot<std::byte>(group, group.rank, PeerCall(group));
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * cols; i += step) {
    StoreWire(slot, is_bf16, i, x[i / cols * x_stride + i % cols]);
  }
}

// Grid: 1. Block: one warp. Ends the call: the kernel after it reads the slots of call *calls.
__global__ void AllReduceMeet(const __grid_constant__ Communicator group) {
  const uint64_t call = PeerCall(group);
  MeetPeers(group, call, 0);
  if (threadIdx.x == 0) *group.calls = call;
}

// Grid: any. Block: kThreads. Shared memory: none.
__global__ __launch_bounds__(kThreads) void AllReduceAdd(
    float* out,  // [rows, cols], rows out_stride apart
    int64_t rows, int64_t cols, int64_t out_stride, bool is_bf16, bool round,
    const __grid_constant__ Communicator group) {
  const uint64_t call = PeerCall(group) - 1;
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * cols; i += step) {
    float sum = LoadWire(PeerSlot<std::byte>(group, 0, call), is_bf16, i);
    for (int r = 1; r < group.ranks; ++r) {
      sum += LoadWire(PeerSlot<std::byte>(group, r, call), is_bf16, i);
    }
    out[i / cols * out_stride + i % cols] = round ? RoundBf16(sum) : sum;
  }
}

// wire [rows, cols] = x. Grid: any. Block: kThreads.
__global__ __launch_bounds__(kThreads) void AllReduceToWire(
    const float* x,  // [rows, cols], rows x_stride apart
    int64_t rows, int64_t cols, int64_t x_stride, bool is_bf16, void* wire) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * cols; i += step) {
    StoreWire(wire, is_bf16, i, x[i / cols * x_stride + i % cols]);
  }
}

// out = wire; both may be one buffer of f32. Grid: any. Block: kThreads.
__global__ __launch_bounds__(kThreads) void AllReduceFromWire(
    const void* wire,  // [rows, cols], rows wire_stride apart
    int64_t wire_stride, bool is_bf16, bool round,
    float* out,  // [rows, cols], rows out_stride apart
    int64_t rows, int64_t cols, int64_t out_stride) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < rows * cols; i += step) {
    const float value = LoadWire(wire, is_bf16, i / cols * wire_stride + i % cols);
    out[i / cols * out_stride + i % cols] = round ? RoundBf16(value) : value;
  }
}

LaunchShape ShapeOf(int64_t elements) {
  LaunchShape shape;
  shape.grid = dim3(static_cast<unsigned>(
      std::clamp<int64_t>((elements + kThreads - 1) / kThreads, 1, kMaxBlocks)));
  shape.block = dim3(kThreads);
  return shape;
}

absl::Status ExchangeRows(const AllReduceCall& call, int64_t first, int64_t count,
                          const Exec& exec) {
  const AllReduceArgs& args = call.args;
  const int64_t cols = args.x.cols;
  const bool is_bf16 = args.wire == DType::kBf16;
  const LaunchShape shape = ShapeOf(count * cols);
  LaunchShape meeting;
  meeting.grid = dim3(1);
  meeting.block = dim3(kWarpLanes);
  const float* x = args.x.f32(first);
  ISTHMUS_RETURN_IF_ERROR(Launch("AllReducePublish", shape, exec, AllReducePublish, x, count, cols,
                                 args.x.row_stride, is_bf16, call.group));
  ISTHMUS_RETURN_IF_ERROR(Launch("AllReduceMeet", meeting, exec, AllReduceMeet, call.group));
  return Launch("AllReduceAdd", shape, exec, AllReduceAdd, args.out.f32(first), count, cols,
                args.out.row_stride, is_bf16, args.round_output, call.group);
}

}  // namespace

absl::Status LaunchToWire(const AllReduceArgs& args, void* wire, const Exec& exec) {
  const float* x = args.x.f32(0);
  return Launch("AllReduceToWire", ShapeOf(args.x.rows * args.x.cols), exec, AllReduceToWire, x,
                args.x.rows, args.x.cols, args.x.row_stride, args.wire == DType::kBf16, wire);
}

absl::Status LaunchFromWire(const AllReduceArgs& args, const void* wire, const Exec& exec) {
  const MatrixView& out = args.out;
  return Launch("AllReduceFromWire", ShapeOf(out.rows * out.cols), exec, AllReduceFromWire, wire,
                out.cols, args.wire == DType::kBf16, args.round_output, out.f32(0), out.rows,
                out.cols, out.row_stride);
}

absl::Status LaunchAllReducePeers(const AllReduceCall& call, const Exec& exec) {
  const AllReduceArgs& args = call.args;
  const MatrixView& x = args.x;
  if (call.group.ranks == 1) {  // Nothing travels: a copy, or a rounding in place.
    return Launch("AllReduceFromWire", ShapeOf(x.rows * x.cols), exec, AllReduceFromWire,
                  static_cast<const void*>(x.data), x.row_stride, false, args.round_output,
                  args.out.f32(0), x.rows, x.cols, args.out.row_stride);
  }
  const int64_t step = RowsPerSlot(call);
  for (int64_t first = 0; first < x.rows; first += step) {
    ISTHMUS_RETURN_IF_ERROR(ExchangeRows(call, first, std::min(step, x.rows - first), exec));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
