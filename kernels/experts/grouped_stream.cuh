// SPDX-License-Identifier: Apache-2.0
// How the products of experts.grouped_w4a8 share their work, and the stream of weights that every
// warp keeps running (grouped_products.cuh).
//
// Letters: K inputs, N outputs of the matrices of a product.
#pragma once

#include "kernels/core/async_copy.cuh"
#include "kernels/core/launch.cuh"
#include "kernels/core/weight.h"
#include "kernels/experts/experts_grouped.h"

namespace isthmus::kernels::grouped {

inline constexpr int kWarps = 8;
inline constexpr int kThreads = kWarps * kWarpLanes;
inline constexpr int kStageBytes = 4 * 576;  // Two groups of fp4, or one of fp8, of 16 outputs.

// How products are made. kF16: sm_90 has no mma.sync of e4m3 and would convert both operands to f16
// every time, so rows come as f16 and codes are converted once. kE4m3: where it exists; scales are
// applied to sums. kBlockScaled: sm_120a's instruction applies them.
enum class MmaKind : uint8_t { kF16, kE4m3, kBlockScaled };

template <ProductKind kKind>
inline constexpr int kMatrices = kKind == ProductKind::kGate ? 2 : 1;
// The inputs of an output are added up in this many parts, and the parts in their order, whoever
// does it.
template <ProductKind kKind>
inline constexpr int kParts = kKind == ProductKind::kGate ? 8 : 1;

// Who does it. Few tokens: a block of threads takes a unit of kRowTiles rows of tiles, kSplits
// warps the parts of each, so that there are enough units for all. Many: every warp takes units of
// a row of tiles and all of its inputs, and never waits for another warp.
template <ProductKind kKind, bool kAlone>
inline constexpr int kSplits = kAlone ? 1 : kParts<kKind>;
template <ProductKind kKind, bool kAlone>
inline constexpr int kRowTiles = kAlone ? 1 : kWarps / kSplits<kKind, kAlone>;

// Stages of a warp's ring, for at most 8 kBlocks rows of a unit: what the partial sums leave.
template <int kBlocks>
inline constexpr int kStages = kBlocks == 1   ? 5
                               : kBlocks == 2 ? 4
                                              : 3;
// Blocks of threads on a multiprocessor of sm_90. Many rows need the registers of both.
template <int kBlocks>
inline constexpr int kBlocksPerSm = kBlocks <= 2 ? 2 : 1;

template <ProductKind kKind, int kBlocks>
inline constexpr int kSumFloats = kWarps* kMatrices<kKind>* kBlocks * 128;
template <ProductKind kKind, int kBlocks>
inline constexpr int kProductSharedBytes =
    kWarps* kStages<kBlocks>*(kStageBytes + static_cast<int>(sizeof(Mbarrier))) +
    kSumFloats<kKind, kBlocks>* static_cast<int>(sizeof(float));

// Of 16 outputs.
__device__ __forceinline__ int GroupBytes(WeightFormat format) {
  if (format == WeightFormat::kMxfp4) return 2 * 544;
  return format == WeightFormat::kNvfp4 ? 2 * 576 : 4 * 512;
}

__device__ __forceinline__ int WarpIndex() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

// Dynamic shared memory: the rings of the warps, their parts of the sums, the rings' barriers.
template <int kBlocks>
__device__ __forceinline__ unsigned char* StageOf(int warp, int stage) {
  return DynamicShared() + (warp * kStages<kBlocks> + stage) * kStageBytes;
}
template <int kBlocks>
__device__ __forceinline__ float* PartsOf() {
  return reinterpret_cast<float*>(StageOf<kBlocks>(kWarps, 0));
}
// This lane's place in the part of a warp.
template <ProductKind kKind, int kBlocks>
__device__ __forceinline__ float* PartOf(int warp) {
  return PartsOf<kBlocks>() + warp * kMatrices<kKind> * kBlocks * 128 +
         static_cast<int>(threadIdx.x) % kWarpLanes;
}
template <ProductKind kKind, int kBlocks>
__device__ __forceinline__ Mbarrier* BarrierOf(int warp, int stage) {
  return reinterpret_cast<Mbarrier*>(PartsOf<kBlocks>() + kSumFloats<kKind, kBlocks>) +
         warp * kStages<kBlocks> + stage;
}

// Sets out the weights of the shared expert, of which every step needs all, towards the L2 while
// the list of the others is made. A slice a block.
__device__ __forceinline__ void PrefetchShared(const ProductArgs& args) {
  if (threadIdx.x != 0) return;
  for (int i = 0; i < 3; ++i) {
    const int64_t pieces = args.shared_bytes[i] / 16;
    const int64_t first = pieces * blockIdx.x / gridDim.x;
    const int64_t last = pieces * (blockIdx.x + 1) / gridDim.x;
    if (first == last) continue;
    BulkPrefetchL2(args.shared_tiles[i] + first * 16, static_cast<unsigned>((last - first) * 16));
  }
}

// Units [begin, end) of a block of threads or of a warp, and the place of the first.
struct UnitRange {
  int begin, end;
  int job, row, block;
};

// Costs [cost, ...) begin with this unit: those of job 0 come first.
__device__ __forceinline__ int UnitAt(int64_t cost, int shared_units, int shared_cost) {
  const int64_t of_shared = int64_t{shared_units} * shared_cost;
  if (cost >= of_shared) return static_cast<int>(cost - of_shared) + shared_units;
  return static_cast<int>((cost + shared_cost - 1) / shared_cost);
}

// Share `index` of `shares`, even by cost and consecutive, so that a block of threads stays with an
// expert.
__device__ __forceinline__ UnitRange ShareOf(const ProductArgs& args, int row_units, int64_t index,
                                             int64_t shares) {
  const JobList& list = *args.scratch.list;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int jobs = list.num_jobs;
  const int shared_units = args.shared_cost > 1 ? list.first_block[1] * row_units : 0;
  const int units = list.num_blocks * row_units;
  const int64_t cost = units + int64_t{shared_units} * (args.shared_cost - 1);
  UnitRange range = {UnitAt(cost * index / shares, shared_units, args.shared_cost),
                     UnitAt(cost * (index + 1) / shares, shared_units, args.shared_cost), 0, 0, 0};
  int begun = 0;  // Jobs that begin at or before the first unit.
  for (int j = lane; j < jobs; j += kWarpLanes) {
    if (list.first_block[j] * row_units <= range.begin) ++begun;
  }
  range.job = __reduce_add_sync(kFullWarp, begun) - 1;
  if (range.begin >= range.end) return range;
  const int blocks = list.first_block[range.job + 1] - list.first_block[range.job];
  const int in_job = range.begin - list.first_block[range.job] * row_units;
  range.row = in_job / blocks;
  range.block = in_job % blocks;
  return range;
}

// A warp's next copy, in shared memory: it takes no registers from the products.
struct NextCopy {
  const uint8_t* from[2];  // Of w1 and w3, or of w2.
  int job, row, block;
  int units_left;
  int group;
  int group_bytes;
  int stage;
  int matrix;
};

// The weights that a warp reads, stage by stage, as far ahead of their use as the ring is long. A
// stage is one or two groups of one matrix; those of w1 and w3 take turns.
template <ProductKind kKind, bool kAlone, int kBlocks>
class WeightStream {
 public:
  static constexpr int kDepth = kStages<kBlocks>;
  static constexpr int kSplit = kSplits<kKind, kAlone>;
  static constexpr int kTiles = kRowTiles<kKind, kAlone>;
  static_assert(kDepth > kMatrices<kKind>);

  // Fills the ring.
  __device__ __forceinline__ WeightStream(const ProductArgs& args, const UnitRange& range,
                                          NextCopy* next_of_warp)
      : args_(args), next_of_warp_(next_of_warp) {
    if (threadIdx.x % kWarpLanes != 0) return;
    NextCopy next = {};
    next.job = range.job;
    next.row = range.row;
    next.block = range.block;
    next.units_left = first() == last() ? 0 : range.end - range.begin;
    if (next.units_left > 0) Begin(next);
    for (int i = 0; i < kDepth; ++i) Issue(next);
    *next_of_warp_ = next;
  }
  // The share of the inputs of this warp, in groups.
  __device__ __forceinline__ int first() const { return groups() * Split() / kSplit; }
  __device__ __forceinline__ int last() const { return groups() * (Split() + 1) / kSplit; }
  __device__ __forceinline__ int groups() const { return args_.inputs / static_cast<int>(kGroup); }

  // The oldest stages, one of every matrix, when they have arrived.
  __device__ __forceinline__ void Wait(const unsigned char* (&stages)[kMatrices<kKind>]) {
#pragma unroll
    for (int m = 0; m < kMatrices<kKind>; ++m) {
      BarrierWait(BarrierOf<kKind, kBlocks>(WarpIndex(), used_), parity_);
      stages[m] = StageOf<kBlocks>(WarpIndex(), used_);
      used_ = used_ + 1 == kDepth ? 0 : used_ + 1;
      parity_ ^= used_ == 0 ? 1u : 0u;
    }
  }
  // They have been read: their places take the next copies.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) {
      NextCopy next = *next_of_warp_;
#pragma unroll 1
      for (int m = 0; m < kMatrices<kKind>; ++m) Issue(next);
      *next_of_warp_ = next;
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static int Split() { return WarpIndex() % kSplit; }
  // Starts the next copy, if there is any left. One lane.
  __device__ __forceinline__ void Issue(NextCopy& next) const {
    if (next.units_left <= 0) return;
    const int most = next.group_bytes == GroupBytes(WeightFormat::kFp8Block128) ? 1 : 2;
    const int count = last() - next.group < most ? last() - next.group : most;
    const auto bytes = static_cast<unsigned>(count * next.group_bytes);
    Mbarrier* full = BarrierOf<kKind, kBlocks>(WarpIndex(), next.stage);
    BarrierArriveExpect(full, bytes);
    BulkCopyOnce(StageOf<kBlocks>(WarpIndex(), next.stage), next.from[0], bytes, full);
    next.stage = next.stage + 1 == kDepth ? 0 : next.stage + 1;
    next.from[0] += bytes;
    if (kMatrices<kKind> == 2) {
      const uint8_t* other = next.from[1];
      next.from[1] = next.from[0];
      next.from[0] = other;
      next.matrix ^= 1;
      if (next.matrix != 0) return;
    }
    next.group += count;
    if (next.group == last() && --next.units_left > 0) Advance(next);
  }
  // The first copies of a unit.
  __device__ __forceinline__ void Begin(NextCopy& next) const {
    next.group = first();
    const Job& job = args_.scratch.jobs[next.job];
    const JobWeight& w = kKind == ProductKind::kGate ? job.w1 : job.w2;
    next.group_bytes = GroupBytes(w.format);
    const int64_t row_tile = int64_t{next.row} * kTiles + (kAlone ? 0 : WarpIndex() / kSplit);
    const int64_t offset = (row_tile * groups() + next.group) * next.group_bytes;
    next.from[0] = w.tiles + offset;
    if (kKind == ProductKind::kGate) next.from[1] = job.w3.tiles + offset;
  }
  // To the next unit.
  __device__ __forceinline__ void Advance(NextCopy& next) const {
    const int32_t* first_block = args_.scratch.list->first_block + next.job;
    if (++next.block == first_block[1] - first_block[0]) {
      next.block = 0;
      if (++next.row * kTiles * static_cast<int>(kPanelRows) == args_.outputs) {
        next.row = 0;
        ++next.job;
      }
    }
    Begin(next);
  }

  const ProductArgs& args_;
  NextCopy* next_of_warp_;
  int used_ = 0;
  unsigned parity_ = 0;
};

}  // namespace isthmus::kernels::grouped
