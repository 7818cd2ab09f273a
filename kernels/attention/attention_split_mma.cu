// SPDX-License-Identifier: Apache-2.0
// Sparse attention on tensor cores over entries as the cache stores them: patches
// attention.split_mma (decode) and attention.prefill_mma. How a block works stands in
// attention_mma.cuh.
//
// Decode is bound by latency at small batches and by mma.sync at large ones: 131,072 operations per
// key and row at 64 heads, 47 clocks of an SM at the measured 643 TFLOP/s; 584 bytes per key and
// row from DRAM. One launch: the keys of a row are cut into splits when rows alone do not fill the
// device; splits follow the lengths that the kernel reads, so nothing is scheduled on the host; the
// last split of a row and group of heads adds up all of them, in their order.
#include "kernels/attention/attention_keys.cuh"
#include "kernels/attention/combine_splits.cuh"
#include "kernels/core/workspace.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace attention_mma {
namespace {

constexpr int kUnset = -10000;
constexpr int kMaxSplits = 10;
constexpr int kMinTilesPerSplit = 2;
constexpr int kBlocksPerSm = 2;

// How blocks share the work: block = (row * max_splits + split) * groups + group.
struct SplitPlan {
  int groups = 1;                // Of heads.
  int max_splits = 1;            // Per row.
  float* values = nullptr;       // [row and group][max_splits][heads][kHeadDim], if max_splits > 1
  float2* weights = nullptr;     // [row and group][max_splits][heads]: maximum and sum
  unsigned* counters = nullptr;  // [row and group]
  const unsigned char* chunk_entries = nullptr;
};

__device__ __forceinline__ int TilesPerSplit(const SplitPlan& plan, int tiles) {
  if (plan.max_splits == 1) return tiles;
  const int even = (tiles + plan.max_splits - 1) / plan.max_splits;
  return even < kMinTilesPerSplit ? kMinTilesPerSplit : even;
}

// The factor of a value whose scale has this exponent, relative to the largest scale that this warp
// has seen for the block of channels; o follows a larger one.
template <int kMTiles>
__device__ __forceinline__ uint16_t ValueFactor(int exponent, bool has_key, int* largest_exponent,
                                                float (&o)[kMTiles][8][4]) {
  int largest = *largest_exponent;
  const int tile_largest = __reduce_max_sync(kFullWarp, has_key ? exponent : kUnset);
  if (tile_largest > largest) {
    const float rescale = ClampedPower(largest - tile_largest);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[m][j][i] *= rescale;
      }
    }
    largest = tile_largest;
    __syncwarp();  // All lanes have read it.
    if (FreshLane() == 0) *largest_exponent = largest;
  }
  const int down = largest - exponent;
  return static_cast<uint16_t>(!has_key || down > 24 ? 0
                               : down <= 14          ? (15 - down) << 10
                                                     : 1 << (24 - down));
}

template <int kMTiles>
__device__ __forceinline__ void RescaleValues(const Shared<kMTiles>& shared,
                                              float (&o)[2][kMTiles][8][4]) {
  const int g = FreshLane() / 4;
  float rescale[kMTiles][2];
  bool any = false;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rescale[m][half] = shared.rescale[16 * m + 8 * half + g];
      any = any || rescale[m][half] != 1.0f;
    }
  }
  if (__any_sync(kFullWarp, any ? 1 : 0) == 0) return;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) o[b][m][j][i] *= rescale[m][i / 2];
      }
    }
  }
}

template <int kMTiles>
__device__ __forceinline__ void AddTileValues(const unsigned char* tile,
                                              const Shared<kMTiles>& shared,
                                              float (&o)[2][kMTiles][8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
#pragma unroll
  for (int b = 0; b < 2; ++b) {
#pragma unroll 1  // Two would keep more values than there are registers.
    for (int k16 = 0; k16 < 2; ++k16) {
      if (b == 1 && warp == kBf16Warp) {
        AddBf16Values<kMTiles>(tile, k16, shared.weight_bf16, o[b]);
      } else {
        AddFp8Values<kMTiles>(tile, 2 * warp + b, k16, shared.value_factor[warp][b],
                              shared.weight_f16, o[b]);
      }
    }
  }
}

// Writes the warp's columns: to the output, divided by the sums of weights, or, with `values`, to a
// split's share [heads][kHeadDim].
template <int kMTiles>
__device__ __forceinline__ void StoreValues(const DeviceAttention& args, int64_t row,
                                            int first_head, const Shared<kMTiles>& shared,
                                            const float (&o)[2][kMTiles][8][4], float* values) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int h = 16 * m + 8 * half + lane / 4;
      const float factor = values != nullptr ? 1.0f : 1.0f / shared.total[h];
      if (first_head + h >= args.num_heads) continue;
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float unit = ClampedPower(shared.largest_exponent[warp][b] - kWeightShift);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float x[8];
#pragma unroll
          for (int j = 0; j < 8; ++j) {
            x[j] = o[b][m][j][2 * half + i] * unit * factor;
            if (values == nullptr && args.is_reference) x[j] = RoundBf16(x[j]);
          }
          const int d = 64 * (2 * warp + b) + 16 * (lane % 4) + 8 * i;
          if (values != nullptr) {
            StoreEight(values + h * kHeadDim + d, false, x);
          } else {
            StoreEight(OutputAt(args, row, first_head + h, d), args.is_out_bf16, x);
          }
        }
      }
    }
  }
}

// The factors of the lane's key, for scores and for values.
template <int kMTiles>
__device__ __forceinline__ void PrepareFactors(int kind, int tile, Shared<kMTiles>& shared,
                                               float (&o)[2][kMTiles][8][4]) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const bool has_key = kind != kNoKey;
  Exponents exponents;
  if (kind == kAddedRow) {
    exponents = ExponentsOf(shared.added_row.scale);
  } else if (has_key) {
    exponents = ExponentsOf(shared.queue.scales[tile % 2][threadIdx.x]);
  }
  shared.key_factor[warp][0][lane] = ClampedPower(exponents.of[0] - exponents.of[1]);
  shared.key_factor[warp][1][lane] = ClampedPower(exponents.of[1]);
#pragma unroll
  for (int b = 0; b < 2; ++b) {
    if (warp == kBf16Warp && b == 1) continue;
    shared.value_factor[warp][b][lane] =
        ValueFactor<kMTiles>(exponents.of[b], has_key, &shared.largest_exponent[warp][b], o[b]);
  }
}

// The split's keys, from tile `first`: adds to o and to what the owners know.
template <int kMTiles>
__device__ __forceinline__ void AttendTiles(const DeviceAttention& args, int first,
                                            const uint32_t (&q)[2][4][kMTiles][4],
                                            Shared<kMTiles>& shared, float (&o)[2][kMTiles][8][4]) {
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const RowKeys& keys = shared.keys;
  KeyQueue& queue = shared.queue;
  for (int i = first; i * kTile < keys.num_keys; ++i) {
    unsigned char* tile = shared.tile[i % kStages];
    WaitForCopies<0>();
    __syncwarp();  // Also: the warp has read what is overwritten from here.
    if ((i + 1) * kTile < keys.num_keys) {
      FetchSlice(args, queue, i + 1, shared.tile[(i + 1) % kStages]);
      FetchPage(args, keys, queue, i + 2);
      FetchKind(args, keys, queue, i + 3);
    }
    CommitCopies();
    const int kind = KindIn(queue, i);
    if (__any_sync(kFullWarp, kind != kNoKey ? 1 : 0) == 0) continue;  // The same in all warps.
    const int added_key = keys.num_window - 1 - i * kTile;
    if (keys.chunk_entries == nullptr && added_key >= 0 && added_key < kTile) {
      CopyAddedRow(shared.added_row, added_key, tile);
    }
    PrepareFactors<kMTiles>(kind, i, shared, o);
    __syncwarp();
    ShareScores<kMTiles>(tile, q, shared);
    __syncthreads();
    if (warp < Shared<kMTiles>::kOwners) WeighKeys<kMTiles>(shared, ValidKeys(queue, i));
    __syncthreads();
    RescaleValues<kMTiles>(shared, o);
    AddTileValues<kMTiles>(tile, shared, o);
  }
}

template <int kMTiles>
__device__ __forceinline__ int FirstHead(const SplitPlan& plan) {
  return static_cast<int>(blockIdx.x % static_cast<unsigned>(plan.groups)) * 16 * kMTiles;
}

// Writes what the block has added up: to the output, or to the other splits, of which the last one
// adds up all.
template <int kMTiles>
__device__ __forceinline__ void FinishSplit(const DeviceAttention& args, const SplitPlan& plan,
                                            Shared<kMTiles>& shared,
                                            const float (&o)[2][kMTiles][8][4]) {
  constexpr int kHeads = 16 * kMTiles;
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int first_head = FirstHead<kMTiles>(plan);
  const int64_t row = shared.keys.row;
  const int splits = shared.keys.splits;
  const bool owns = warp < Shared<kMTiles>::kOwners;
  const OwnedHeads heads = owns ? shared.heads[warp][lane] : OwnedHeads();
  float sum = heads.sum;
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  const int own = 8 * warp + lane / 4;
  const bool is_owner = owns && lane % 4 == 0;
  if (splits == 1) {
    if (is_owner) {
      const int head = first_head + own;
      const float sink = head < args.num_heads ? args.sink[head] * kLog2E : 0.0f;
      shared.total[own] = sum + FastExp2(sink - heads.max);
    }
    __syncthreads();
    StoreValues<kMTiles>(args, row, first_head, shared, o, nullptr);
    return;
  }
  const int split = static_cast<int>(blockIdx.x / static_cast<unsigned>(plan.groups) %
                                     static_cast<unsigned>(plan.max_splits));
  const int64_t of_row = row * plan.groups + first_head / kHeads;
  float* values = plan.values + of_row * plan.max_splits * kHeads * kHeadDim;
  float2* weights = plan.weights + of_row * plan.max_splits * kHeads;
  StoreValues<kMTiles>(args, row, first_head, shared, o,
                       values + int64_t{split} * kHeads * kHeadDim);
  if (is_owner) weights[split * kHeads + own] = make_float2(heads.max, sum);
  const auto last = static_cast<unsigned>(splits - 1);
  if (TakeTurn(plan.counters + of_row, last + 1, &shared.turn) != last) return;
  CombineSplits<kMTiles>(args, row, first_head, splits, values, weights,
                         reinterpret_cast<float2*>(shared.share));
}

// Nothing seen yet. `factor` turns the lane's owned head's sums of q k into scores.
template <int kMTiles>
__device__ __forceinline__ void StartHeads(Shared<kMTiles>& shared, float factor) {
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  if (lane < 2) {  // The bf16 block has scale 1.
    shared.largest_exponent[warp][lane] = warp == kBf16Warp && lane == 1 ? 0 : kUnset;
  }
  if (warp < Shared<kMTiles>::kOwners) {
    OwnedHeads heads;
    heads.factor = factor;
    shared.heads[warp][lane] = heads;
  }
}

// Grid: rows * max_splits * groups. Block: kThreads. Shared memory: Shared<kMTiles>. Two blocks to
// an SM.
template <int kMTiles>
__global__ __launch_bounds__(kThreads, kBlocksPerSm) void AttendOnTensorCores(DeviceAttention args,
                                                                              SplitPlan plan) {
  WaitForPredecessor();
  auto& shared = *reinterpret_cast<Shared<kMTiles>*>(DynamicShared());
  const unsigned task = blockIdx.x / static_cast<unsigned>(plan.groups);
  const int64_t row = task / static_cast<unsigned>(plan.max_splits);
  const int sequence = args.batch.row_sequence[row];
  if (sequence < 0) return;
  const int position = args.batch.row_position[row];
  RowKeys keys;
  keys.sequence = args.batch.sequences + sequence;
  keys.chunk_entries = plan.chunk_entries;
  if (args.selected != nullptr) keys.selected = args.selected + row * args.max_selected;
  keys.num_window = position + 1 < args.window ? position + 1 : args.window;
  keys.first_position = position - keys.num_window + 1;
  keys.num_keys = keys.num_window + (args.ratio == 0            ? 0
                                     : args.selected != nullptr ? args.max_selected
                                                                : (position + 1) / args.ratio);
  const int tiles = (keys.num_keys + kTile - 1) / kTile;
  const int per_split = TilesPerSplit(plan, tiles);
  const int splits = (tiles + per_split - 1) / per_split;
  const int split = static_cast<int>(task % static_cast<unsigned>(plan.max_splits));
  if (split >= splits) return;
  const int first = split * per_split;
  const int end = first + per_split < tiles ? first + per_split : tiles;
  if (end * kTile < keys.num_keys) keys.num_keys = end * kTile;
  keys.row = row;
  keys.splits = splits;
  if (threadIdx.x == 0) shared.keys = keys;
  // While q is on its way and converted, the first keys are found.
  for (int i = 0; i < kKindTiles - 1; ++i) FetchKind(args, keys, shared.queue, first + i);
  CommitCopies();
  const int first_head = FirstHead<kMTiles>(plan);
  FindHeadMax<kMTiles>(args, row, first_head, shared);
  WaitForCopies<0>();
  for (int i = 0; i < 2; ++i) FetchPage(args, keys, shared.queue, first + i);
  CommitCopies();
  const int added_tile = (keys.num_window - 1) / kTile;
  if (keys.chunk_entries == nullptr && first <= added_tile && added_tile < end) {
    EncodeAddedRow(args, *keys.sequence, first_head == 0, &shared.added_row);
  }
  __syncthreads();
  StartHeads<kMTiles>(shared,
                      args.scale * kLog2E * ConvertQueries<kMTiles>(args, row, first_head, shared));
  __syncwarp();
  uint32_t q[2][4][kMTiles][4];
  ReadQueries<kMTiles>(shared, q);
  WaitForCopies<0>();
  __syncthreads();  // The memory of the tiles is free.
  FetchSlice(args, shared.queue, first, shared.tile[first % kStages]);
  CommitCopies();
  float o[2][kMTiles][8][4] = {};
  AttendTiles<kMTiles>(args, first, q, shared, o);
  LetSuccessorStart();
  FinishSplit<kMTiles>(args, plan, shared, o);
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

template <int kMTiles>
absl::Status LaunchWithHeads(const AttentionArgs& args, const Exec& exec,
                             const unsigned char* chunk_entries, Workspace::Scope& scope) {
  constexpr int kHeads = 16 * kMTiles;
  static_assert(sizeof(Shared<kMTiles>) <= kMaxSharedBytes);
  static_assert(sizeof(Shared<kMTiles>::share) >= kMaxSplits * kHeads * sizeof(float2));
  SplitPlan plan;
  plan.groups = static_cast<int>(CeilDiv(args.num_heads, kHeads));
  plan.chunk_entries = chunk_entries;
  plan.counters = exec.counters;
  const int64_t tasks = args.q.rows * plan.groups;
  const int64_t tiles = CeilDiv(MaxKeys(args), kTile);
  // One split where a row's bits must not depend on the batch, nor on its being decoded or not.
  if (!exec.batch_invariant && exec.counters != nullptr && tasks <= kNumCounters) {
    int64_t splits = std::min<int64_t>(int64_t{kBlocksPerSm} * exec.num_sms / tasks, kMaxSplits);
    splits = std::min<int64_t>(splits, CeilDiv(tiles, kMinTilesPerSplit));
    plan.max_splits = static_cast<int>(std::max<int64_t>(1, splits));
  }
  if (plan.max_splits > 1) {
    plan.values = scope.Take<float>(tasks * plan.max_splits * kHeads * kHeadDim);
    plan.weights = scope.Take<float2>(tasks * plan.max_splits * kHeads);
  }
  const LaunchShape shape = {.grid = dim3(static_cast<unsigned>(tasks * plan.max_splits)),
                             .block = dim3(kThreads),
                             .shared_bytes = sizeof(Shared<kMTiles>),
                             .overlaps_predecessor = true};
  return Launch("AttendOnTensorCores", shape, exec, AttendOnTensorCores<kMTiles>, ToDevice(args),
                plan);
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
                               .block = dim3(attention_mma::kHeadDim / kKvNopeBlock * kWarpLanes)};
    ISTHMUS_RETURN_IF_ERROR(Launch("EncodeChunk", shape, exec, attention_mma::EncodeChunk,
                                   ToDevice(args), chunk_entries));
  }
  // Blocks of 16 heads while those of 32 would leave most of the device idle.
  const int64_t tasks = rows * CeilDiv(args.num_heads, 32);
  const bool is_small =
      args.num_heads <= 16 || (!exec.batch_invariant && 4 * tasks <= exec.num_sms);
  ISTHMUS_RETURN_IF_ERROR(
      is_small ? attention_mma::LaunchWithHeads<1>(args, exec, chunk_entries, scope)
               : attention_mma::LaunchWithHeads<2>(args, exec, chunk_entries, scope));
  return has_chunks ? CommitWindowCuda(args, exec) : absl::OkStatus();
}

}  // namespace isthmus::kernels
