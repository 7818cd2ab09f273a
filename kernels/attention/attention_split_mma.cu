// SPDX-License-Identifier: Apache-2.0
// Sparse attention on tensor cores over entries as the cache stores them: patches
// attention.split_mma (decode) and attention.prefill_mma. How a block works stands in
// attention_mma.cuh.
//
// Decode is bound by latency at small batches and by mma.sync at large ones: 131,072 operations per
// key and row at 64 heads, 47 clocks of an SM at the measured 643 TFLOP/s; 584 bytes per key and
// row from DRAM. The keys of a row are cut into splits when rows alone do not fill the device;
// splits follow the lengths that the kernel reads, so nothing is scheduled on the host; a second
// launch, which has started before the first one ends, adds them up in their order.
#include "kernels/attention/attention_keys.cuh"
#include "kernels/attention/attention_values.cuh"
#include "kernels/attention/combine_splits.cuh"
#include "kernels/core/workspace.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace attention_mma {
namespace {

// Few rows: blocks of 16 heads, a warp a block of channels. Many: all heads of a row, or half of
// them, over one copy of its keys.
using FewRows = BlockShape<8, 1, 1>;
using HalfRow = BlockShape<4, 1, 2>;
using WholeRow = BlockShape<4, 2, 2>;

// To an SM: a thread of the first has half as many registers as one of the others.
template <typename Shape>
constexpr int kMinBlocks = Shape::kMTiles* Shape::kThreads > 256 ? 1 : 2;

// The warp that follows the keys.
constexpr int kFollower = kStages;

// Eight channels of a lane, four and four, so that a lane and its neighbour write 32 bytes in a row
// at once: `first` lies in the even lane's eight, `second` in the odd one's.
struct PairedEight {
  float first[4];
  float second[4];
};
__device__ __forceinline__ PairedEight ShareEight(const float (&x)[8], bool is_odd) {
  PairedEight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(kFullWarp, is_odd ? x[i] : x[4 + i], 1);
    out.first[i] = is_odd ? other : x[i];
    out.second[i] = is_odd ? x[4 + i] : other;
  }
  return out;
}

// Writes the warp's columns: to the output, divided by the sums of weights, or, with `values`, to a
// split's share [heads][kHeadDim].
template <typename Shape>
__device__ __forceinline__ void StoreValues(const DeviceAttention& args, int64_t row,
                                            const Shared<Shape>& shared, const Units<Shape>& units,
                                            const Sums<Shape>& sums, float* values) {
  const int lane = FreshLane();
  const bool is_odd = lane % 2 != 0;
  // Of the even lane's eight; the odd one's begin 16 further.
  const int first_channel =
      kKvNopeBlock * Shape::kBlocks * SliceOf<Shape>() + 32 * (lane % 4 / 2) + (is_odd ? 4 : 0);
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = 16 * (Shape::kMTiles * GroupOf<Shape>() + m) + 8 * half + lane / 4;
      const int head = shared.keys.first_head + h;
      const float factor = values != nullptr ? 1.0f : 1.0f / shared.total[h];
      float* to = values + int64_t{head} * kHeadDim + first_channel;
#pragma unroll
      for (int b = 0; b < Shape::kBlocks; ++b) {
        const float unit = ClampedPower(units.exponent[b] - kWeightShift) * factor;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = sums.o[b][m][j][2 * half + i] * unit;
          const PairedEight eight = ShareEight(x, is_odd);
          const int d = kKvNopeBlock * b + 8 * i;
          if (head >= args.num_heads) continue;
          if (values != nullptr) {
            StoreFour(to + d, eight.first);
            StoreFour(to + d + 16, eight.second);
          } else {
            StoreOutput(args, row, head, first_channel + d, eight.first);
            StoreOutput(args, row, head, first_channel + d + 16, eight.second);
          }
        }
      }
    }
  }
}

// Writes what the block has added up: to the output, or for CombineSplits.
template <typename Shape>
__device__ __forceinline__ void FinishSplit(const DeviceAttention& args, const SplitPlan& plan,
                                            const OwnedHead& owned, const Units<Shape>& units,
                                            const Sums<Shape>& sums, Shared<Shape>& shared) {
  const int lane = FreshLane();
  const int64_t row = shared.keys.row;
  const int first_head = shared.keys.first_head;
  float sum = owned.sum;
#pragma unroll
  for (int lanes = 1; lanes < Shape::kLanes; lanes *= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, lanes);
  }
  const int own = static_cast<int>(threadIdx.x) / kWarpLanes * Shape::kOwned + lane / Shape::kLanes;
  const int head = first_head + own;
  const bool is_first = lane % Shape::kLanes == 0 && head < args.num_heads;
  float* values = nullptr;
  if (plan.max_splits == 1) {
    if (is_first) shared.total[own] = sum + FastExp2(args.sink[head] * kLog2E - owned.max);
    __syncthreads();
  } else {
    const int64_t at = (row * plan.max_splits + shared.keys.split) * args.num_heads;
    if (is_first) plan.weights[at + head] = make_float2(owned.max, sum);
    values = plan.values + at * kHeadDim;
  }
  StoreValues<Shape>(args, row, shared, units, sums, values);
}

// The split's keys. Two barriers a tile: behind the shares of its scores, and behind its weights,
// where the next tile has arrived as well, so that this one's values and the next one's scores are
// multiplied without a pause.
template <typename Shape>
__device__ __forceinline__ void AttendTiles(const DeviceAttention& args,
                                            const Queries<Shape>& queries, KeyFollower& follower,
                                            OwnedHead& owned, Units<Shape>& units,
                                            Sums<Shape>& sums, Shared<Shape>& shared) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const RowKeys& keys = shared.keys;
  const float factor = args.scale * kLog2E;
#pragma unroll 1  // Also: one copy of the code, which a short split fetches cold.
  for (int i = -1; i < keys.num_tiles; ++i) {
    const int next = (i + 1) % kStages;
    if (i >= 0) {
      __syncthreads();
      const bool has_keys = shared.valid[i % 4] != 0;
      if (i > 0 && i + 2 < keys.num_tiles) {
        FetchTile<Shape>(args, shared.place[i % 2], (i + 2) % kStages, shared);
      }
      if (i > 0) CommitCopies();
      if (warp == kFollower && i + 3 < keys.num_tiles) {
        FollowKeys<Shape>(args, keys, i + 3, shared, follower);
      }
      if (has_keys) WeighKeys<Shape>(factor, shared.valid[i % 4], shared, owned);
      if (i + 1 >= kStages && i + 1 == AddedTile(keys)) CopyAddedRow<Shape>(keys, next, shared);
      WaitForCopies<1>();
      __syncthreads();
      if (has_keys) {
        AddTileValues<Shape>(i % kStages, shared.valid[i % 4], shared, units, sums);
      }
    }
    if (i + 1 < keys.num_tiles && shared.valid[(i + 1) % 4] != 0) {
      ShareScores<Shape>(queries, next, shared);
    }
  }
}

// Grid: (rows, max_splits, groups of heads). Block: Shape::kThreads. Shared memory: Shared<Shape>.
template <typename Shape>
__global__ __launch_bounds__(Shape::kThreads,
                             kMinBlocks<Shape>) void AttendOnTensorCores(DeviceAttention args,
                                                                         SplitPlan plan) {
  auto& shared = *reinterpret_cast<Shared<Shape>*>(DynamicShared());
  const int first_head = static_cast<int>(blockIdx.z) * Shape::kHeads;
  RowKeys keys = KeysOf(args, plan, blockIdx.x, static_cast<int>(blockIdx.y));
  keys.first_head = first_head;
  WaitForPredecessor();
  LetSuccessorStart();
  if (keys.num_tiles == 0) return;
  if (threadIdx.x == 0) shared.keys = keys;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  // What the row needs is on its way at once: its keys' places, q, the row that the step adds.
  int kind = kNoKey;
  if (warp < kStages) kind = KindOf(args, keys, warp);
  RawQueries<Shape> raw;
  LoadQueries<Shape>(args, keys.row, first_head, raw);
  AddedRow<Shape> added;
  LoadAddedRow<Shape>(args, keys, added);
  auto* first_places = reinterpret_cast<Place(*)[kTile]>(shared.share);  // Not needed yet.
  KeyFollower follower;
  if (warp < kStages) {
    LeavePlaces(args, keys, kind, PageOfKey(args, keys, kind), first_places[warp],
                &shared.valid[warp]);
  } else if (warp == kFollower && keys.num_tiles > kStages) {
    StartFollowing(args, keys, kStages, follower);
  }
  __syncthreads();
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    if (i < keys.num_tiles) FetchTile<Shape>(args, first_places[i], i, shared);
    CommitCopies();
  }
  Queries<Shape> queries;
  ConvertQueries<Shape>(raw, queries, shared);
  EncodeAddedRow<Shape>(args, keys, added, first_head == 0, shared);
  WaitForCopies<kStages - 1>();
  __syncthreads();
  OwnedHead owned;
  Sums<Shape> sums;
  Units<Shape> units;
#pragma unroll
  for (int b = 0; b < Shape::kBlocks; ++b) units.exponent[b] = kUnset;
  AttendTiles<Shape>(args, queries, follower, owned, units, sums, shared);
  FinishSplit<Shape>(args, plan, owned, units, sums, shared);
}

// Grid: rows. Block: a warp per block of channels. Shared memory: none.
__global__ void EncodeChunk(DeviceAttention args, unsigned char* entries) {
  if (args.batch.row_sequence[blockIdx.x] < 0) return;
  auto* entry = reinterpret_cast<std::byte*>(entries + int64_t{blockIdx.x} * kChunkEntryBytes);
  const int block = static_cast<int>(threadIdx.x) / kWarpLanes;
  EncodeKvBlock(args.chunk_kv + int64_t{blockIdx.x} * args.kv_stride, kNope, block, entry,
                entry + kEntryBytes);
  if (threadIdx.x == 0) entry[kEntryBytes + kNope / kKvNopeBlock] = std::byte{0};
}

// Exact. Nothing is divided by numbers below 1.
Divisor DivisorOf(int64_t by) {
  if (by < 1) return {};
  int bits = 0;
  while ((int64_t{1} << bits) < by) ++bits;
  const int shift = 31 + bits;
  return {static_cast<uint32_t>(((uint64_t{1} << shift) + by - 1) / by), shift};
}

template <typename Shape>
absl::Status LaunchWithShape(const AttentionArgs& args, const Exec& exec,
                             const unsigned char* chunk_entries, Workspace::Scope& scope) {
  static_assert(sizeof(Shared<Shape>) <= kMaxSharedBytes);
  SplitPlan plan;
  plan.chunk_entries = chunk_entries;
  plan.by_ratio = DivisorOf(args.ratio);
  plan.by_window = DivisorOf(args.window);
  plan.by_page = DivisorOf(args.entry_plane.entries);
  const auto rows = static_cast<unsigned>(args.q.rows);
  const unsigned groups = CeilDiv(args.num_heads, Shape::kHeads);
  const int64_t tasks = args.q.rows * groups;
  // One split where a row's bits must not depend on the batch, nor on its being decoded or not.
  if (!exec.batch_invariant) {
    const int64_t blocks_per_sm = exec.arch >= kArchSm120 ? 1 : kMinBlocks<Shape>;
    int64_t splits = std::min<int64_t>(blocks_per_sm * exec.num_sms / tasks, kMaxSplits);
    splits = std::min<int64_t>(splits, CeilDiv(MaxKeys(args), kTile));
    plan.max_splits = static_cast<int>(std::max<int64_t>(1, splits));
  }
  if (plan.max_splits > 1) {
    const int64_t shares = args.q.rows * plan.max_splits * args.num_heads;
    plan.values = scope.Take<float>(shares * kHeadDim);
    plan.weights = scope.Take<float2>(shares);
  }
  plan.by_max_splits = DivisorOf(plan.max_splits);
  const auto max_splits = static_cast<unsigned>(plan.max_splits);
  const LaunchShape shape = {.grid = dim3(rows, max_splits, groups),
                             .block = dim3(Shape::kThreads),
                             .shared_bytes = sizeof(Shared<Shape>),
                             .overlaps_predecessor = true};
  ISTHMUS_RETURN_IF_ERROR(
      Launch("AttendOnTensorCores", shape, exec, AttendOnTensorCores<Shape>, ToDevice(args), plan));
  if (plan.max_splits == 1) return absl::OkStatus();
  const LaunchShape combine = {.grid = dim3(rows, static_cast<unsigned>(args.num_heads)),
                               .block = dim3(kCombineThreads),
                               .overlaps_predecessor = true};
  if (plan.max_splits <= 4) {
    return Launch("CombineSplits", combine, exec, CombineSplits<4>, ToDevice(args), plan);
  }
  return Launch("CombineSplits", combine, exec, CombineSplits<10>, ToDevice(args), plan);
}

absl::Status LaunchAll(const AttentionArgs& args, const Exec& exec,
                       const unsigned char* chunk_entries, Workspace::Scope& scope) {
  // Blocks of 16 heads while those of all heads would leave half of the device idle.
  const bool is_few = !exec.batch_invariant &&
                      args.q.rows * CeilDiv(args.num_heads, FewRows::kHeads) <= exec.num_sms;
  if (is_few || args.num_heads <= FewRows::kHeads) {
    return LaunchWithShape<FewRows>(args, exec, chunk_entries, scope);
  }
  return args.num_heads <= HalfRow::kHeads
             ? LaunchWithShape<HalfRow>(args, exec, chunk_entries, scope)
             : LaunchWithShape<WholeRow>(args, exec, chunk_entries, scope);
}

}  // namespace
}  // namespace attention_mma

absl::Status LaunchAttentionMma(const AttentionArgs& args, const Exec& exec) {
  using attention_mma::kChunkEntryBytes;
  const int64_t rows = args.q.rows;
  if (rows == 0) return absl::OkStatus();
  Workspace::Scope scope(exec.workspace);
  unsigned char* chunk_entries = nullptr;
  // A step of one row per sequence encodes and commits it in the same launch: the ring's slot that
  // it takes is that of the one position which has just left the window.
  const bool has_chunks = args.device_batch->max_rows_per_sequence > 1;
  if (has_chunks) {
    chunk_entries = scope.Take<unsigned char>(rows * kChunkEntryBytes);
    const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(rows)),
                               .block = dim3(attention_mma::kNumBlocks * kWarpLanes)};
    ISTHMUS_RETURN_IF_ERROR(Launch("EncodeChunk", shape, exec, attention_mma::EncodeChunk,
                                   ToDevice(args), chunk_entries));
  }
  ISTHMUS_RETURN_IF_ERROR(attention_mma::LaunchAll(args, exec, chunk_entries, scope));
  return has_chunks ? CommitWindowCuda(args, exec) : absl::OkStatus();
}

}  // namespace isthmus::kernels
