// SPDX-License-Identifier: Apache-2.0
// All-reduce in one kernel, by pull. Patch all_reduce.one_shot.
//
// Every rank writes its part into its own slot, meets its peers block by block, and reads all slots
// in ascending rank. Reads, not writes, cross the link: over PCIe a multiprocessor reads a peer ten
// times faster than it writes there. Bound by latency at decode sizes: two memory round trips on
// the link (flag, data). Link traffic: (ranks - 1) * bytes read by each rank, and one flag of 8
// bytes per block and peer.
#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/launch.cuh"
#include "kernels/core/peer.cuh"

namespace isthmus::kernels {
namespace {

// 16 bytes on the wire.
template <bool kIsBf16>
inline constexpr int kVector = kIsBf16 ? 8 : 4;

template <bool kIsBf16>
__device__ __forceinline__ uint4 Pack(const float (&values)[kVector<kIsBf16>]) {
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsBf16) {
      words[i] = uint32_t{Bf16Bits(values[2 * i])} | uint32_t{Bf16Bits(values[2 * i + 1])} << 16;
    } else {
      words[i] = __float_as_uint(values[i]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <bool kIsBf16>
__device__ __forceinline__ void Unpack(const uint4& packed, float (&values)[kVector<kIsBf16>]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsBf16) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    } else {
      values[i] = __uint_as_float(words[i]);
    }
  }
}

// Vector v of all slots, added in ascending rank. The loads of all ranks are on their way before
// the first is waited for.
template <bool kIsBf16, int kRanks>
__device__ __forceinline__ void AddVectors(const Communicator& group, uint64_t call, int64_t v,
                                           float (&sum)[kVector<kIsBf16>]) {
  uint4 parts[kRanks];
#pragma unroll
  for (int r = 0; r < kRanks; ++r) {
    if (r < group.ranks) parts[r] = LoadPeer(PeerSlot<uint4>(group, r, call) + v);
  }
  Unpack<kIsBf16>(parts[0], sum);
#pragma unroll
  for (int r = 1; r < kRanks; ++r) {
    if (r >= group.ranks) break;
    float part[kVector<kIsBf16>];
    Unpack<kIsBf16>(parts[r], part);
#pragma unroll
    for (int i = 0; i < kVector<kIsBf16>; ++i) sum[i] += part[i];
  }
}

// Grid: OneShotBlocks(rows * cols / vector), the same on every rank. Block: kOneShotThreads.
// Requires cols % 8 == 0, rows aligned to 16 bytes, the whole in one slot. kRanks >= group.ranks.
// x and out may be one buffer: a thread reads and writes the same vectors of both.
template <bool kIsBf16, int kRanks>
__global__ __launch_bounds__(kOneShotThreads) void AllReduceOneShot(
    const float* x,  // [rows, cols], rows x_stride apart
    float* out,      // [rows, cols], rows out_stride apart
    int64_t rows, int64_t cols, int64_t x_stride, int64_t out_stride, bool round,
    const __grid_constant__ Communicator group) {
  __shared__ unsigned shared_turn;
  constexpr int kSize = kVector<kIsBf16>;
  WaitForPredecessor();
  const uint64_t call = PeerCall(group);
  const int64_t row_vectors = cols / kSize;
  const int64_t vectors = rows * row_vectors;
  const int64_t first = int64_t{blockIdx.x} * kOneShotThreads + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * kOneShotThreads;

  auto* own = PeerSlot<uint4>(group, group.rank, call);
  for (int64_t v = first; v < vectors; v += step) {
    const auto* in =
        reinterpret_cast<const float4*>(x + v / row_vectors * x_stride + v % row_vectors * kSize);
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      const float4 four = in[i];
      values[4 * i] = four.x;
      values[4 * i + 1] = four.y;
      values[4 * i + 2] = four.z;
      values[4 * i + 3] = four.w;
    }
    own[v] = Pack<kIsBf16>(values);
  }

  MeetPeers(group, call, blockIdx.x);
  if (!group.shares_device) LetSuccessorStart();

  for (int64_t v = first; v < vectors; v += step) {
    float sum[kSize];
    AddVectors<kIsBf16, kRanks>(group, call, v, sum);
    auto* target =
        reinterpret_cast<float4*>(out + v / row_vectors * out_stride + v % row_vectors * kSize);
#pragma unroll
    for (int i = 0; i < kSize / 4; ++i) {
      float* four = sum + 4 * i;
      if (round) {
        for (int j = 0; j < 4; ++j) four[j] = RoundBf16(four[j]);
      }
      target[i] = make_float4(four[0], four[1], four[2], four[3]);
    }
  }
  EndPeerCall(group, call, gridDim.x, &shared_turn);
}

template <bool kIsBf16, int kRanks>
absl::Status LaunchOneShot(const AllReduceCall& call, const Exec& exec) {
  const AllReduceArgs& args = call.args;
  LaunchShape shape;
  shape.grid =
      dim3(static_cast<unsigned>(OneShotBlocks(args.x.rows * args.x.cols / kVector<kIsBf16>)));
  shape.block = dim3(kOneShotThreads);
  shape.overlaps_predecessor = !call.group.shares_device;
  const float* x = args.x.f32(0);
  return Launch("AllReduceOneShot", shape, exec, AllReduceOneShot<kIsBf16, kRanks>, x,
                args.out.f32(0), args.x.rows, args.x.cols, args.x.row_stride, args.out.row_stride,
                args.round_output, call.group);
}

template <bool kIsBf16>
absl::Status LaunchForRanks(const AllReduceCall& call, const Exec& exec) {
  if (call.group.ranks <= 2) return LaunchOneShot<kIsBf16, 2>(call, exec);
  if (call.group.ranks <= 4) return LaunchOneShot<kIsBf16, 4>(call, exec);
  return LaunchOneShot<kIsBf16, kMaxRanks>(call, exec);
}

}  // namespace

absl::Status LaunchAllReduceOneShot(const AllReduceCall& call, const Exec& exec) {
  if (call.args.wire == DType::kBf16) return LaunchForRanks<true>(call, exec);
  return LaunchForRanks<false>(call, exec);
}

}  // namespace isthmus::kernels
