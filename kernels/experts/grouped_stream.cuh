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
// applied to sums. kBlockScaled: sm_120a's instruction applies them. kFp4Rows: the same, with rows
// of NVFP4 for weights of fp4.
enum class MmaKind : uint8_t { kF16, kE4m3, kBlockScaled, kFp4Rows };

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
// The stages of all matrices for the same inputs are a turn, which one barrier awaits. So many have
// begun at once.
template <ProductKind kKind, int kBlocks>
inline constexpr int kTurns = (kStages<kBlocks> + kMatrices<kKind> - 1) / kMatrices<kKind>;
template <ProductKind kKind, int kBlocks>
inline constexpr int kProductSharedBytes =
    kWarps*(kStages<kBlocks>* kStageBytes +
            kTurns<kKind, kBlocks> * static_cast<int>(sizeof(Mbarrier))) +
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
__device__ __forceinline__ Mbarrier* BarrierOf(int warp, int turn) {
  return reinterpret_cast<Mbarrier*>(PartsOf<kBlocks>() + kSumFloats<kKind, kBlocks>) +
         warp * kTurns<kKind, kBlocks> + turn;
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
struct alignas(16) NextCopy {
  const uint8_t* from[2];  // Of w1 and w3, or of w2.
  uint32_t bytes_left;     // Of each of them, of the unit, for this warp. 0: no unit is left.
  uint32_t stage_bytes;    // Of a stage but the last of a unit.
  uint32_t stage;          // In bytes from the warp's first.
  uint32_t turn;
  // The unit.
  int32_t job, row, block;
  int32_t units_left;
};

// The weights that a warp reads, stage by stage, as far ahead of their use as the ring is long. A
// stage is one or two groups of one matrix; those of w1 and w3 take turns.
template <ProductKind kKind, bool kAlone, int kBlocks>
class WeightStream {
 public:
  static constexpr int kDepth = kStages<kBlocks>;
  static constexpr int kM = kMatrices<kKind>;
  static constexpr int kSplit = kSplits<kKind, kAlone>;
  static constexpr int kTiles = kRowTiles<kKind, kAlone>;
  static_assert(kDepth > kM);

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
#pragma unroll 1
    for (int i = 0; i < kDepth / kM; ++i) {
      Copy<0>(next);
      if constexpr (kM == 2) Copy<1>(next);
    }
    if constexpr (kDepth % kM != 0) Copy<0>(next);
    *next_of_warp_ = next;
  }
  // The share of the inputs of this warp, in groups.
  __device__ __forceinline__ int first() const { return groups() * Split() / kSplit; }
  __device__ __forceinline__ int last() const { return groups() * (Split() + 1) / kSplit; }
  __device__ __forceinline__ int groups() const { return args_.inputs / static_cast<int>(kGroup); }

  // The oldest stages, one of every matrix, when they have arrived.
  __device__ __forceinline__ void Wait(const unsigned char* (&stages)[kM]) {
    BarrierWait(BarrierOf<kKind, kBlocks>(WarpIndex(), 0) + turn_, parity_);
    // The stage that a turn begins with is always the same if all have room.
    int stage = kDepth % kM == 0 ? turn_ * kM * kStageBytes : stage_;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      stages[m] = StageOf<kBlocks>(WarpIndex(), 0) + stage;
      stage += kStageBytes;
      if (kDepth % kM != 0 && stage == kDepth * kStageBytes) stage = 0;
    }
    stage_ = stage;
    if (++turn_ == kTurns<kKind, kBlocks>) {
      turn_ = 0;
      parity_ ^= 1u;
    }
  }
  // They have been read: their places take the next copies, which begin within a turn where the
  // depth is odd.
  __device__ __forceinline__ void Release() {
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) {
      NextCopy next = *next_of_warp_;
      if constexpr (kDepth % kM != 0) {
        Copy<1>(next);
        Copy<0>(next);
      } else {
        Copy<0>(next);
        if constexpr (kM == 2) Copy<1>(next);
      }
      *next_of_warp_ = next;
    }
    __syncwarp();
  }

 private:
  __device__ __forceinline__ static int Split() { return WarpIndex() % kSplit; }
  // Starts the next copy, which is of matrix kMatrix, if there is any left. One lane.
  template <int kMatrix>
  __device__ __forceinline__ void Copy(NextCopy& next) const {
    if (next.bytes_left == 0) return;
    const uint32_t bytes = next.bytes_left < next.stage_bytes ? next.bytes_left : next.stage_bytes;
    Mbarrier* full = BarrierOf<kKind, kBlocks>(WarpIndex(), 0) + next.turn;
    if (kMatrix == 0) BarrierArriveExpect(full, kM * bytes);
    BulkCopyOnce(StageOf<kBlocks>(WarpIndex(), 0) + next.stage, next.from[kMatrix], bytes, full);
    next.stage += kStageBytes;
    if (next.stage == kDepth * kStageBytes) next.stage = 0;
    next.from[kMatrix] += bytes;
    if (kMatrix + 1 < kM) return;
    if (++next.turn == kTurns<kKind, kBlocks>) next.turn = 0;
    next.bytes_left -= bytes;
    if (next.bytes_left == 0 && --next.units_left > 0) Advance(next);
  }
  // The first copies of a unit.
  __device__ __forceinline__ void Begin(NextCopy& next) const {
    const Job& job = args_.scratch.jobs[next.job];
    const JobWeight& w = kKind == ProductKind::kGate ? job.w1 : job.w2;
    const int group_bytes = GroupBytes(w.format);
    next.bytes_left = static_cast<uint32_t>((last() - first()) * group_bytes);
    next.stage_bytes = static_cast<uint32_t>(
        w.format == WeightFormat::kFp8Block128 ? group_bytes : 2 * group_bytes);
    const int64_t row_tile = int64_t{next.row} * kTiles + (kAlone ? 0 : WarpIndex() / kSplit);
    const int64_t offset = (row_tile * groups() + first()) * group_bytes;
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
  int stage_ = 0;  // In bytes from the warp's first.
  int turn_ = 0;
  unsigned parity_ = 0;
};

}  // namespace isthmus::kernels::grouped
