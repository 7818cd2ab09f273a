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

// How a block cuts a unit: kRowTiles rows of tiles, the inputs of each over kSplits warps.
template <ProductKind kKind>
inline constexpr int kMatrices = kKind == ProductKind::kGate ? 2 : 1;
template <ProductKind kKind>
inline constexpr int kSplits = kKind == ProductKind::kGate ? 8 : 2;
template <ProductKind kKind>
inline constexpr int kRowTiles = kWarps / kSplits<kKind>;

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

// Units [begin, end) of a block of threads, and the place of the first.
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

// An even share of the cost, consecutive, so that a block of threads stays with an expert.
__device__ __forceinline__ UnitRange ShareOf(const ProductArgs& args, int row_units) {
  const JobList& list = *args.scratch.list;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int jobs = list.num_jobs;
  const int shared_units = args.shared_cost > 1 ? list.first_block[1] * row_units : 0;
  const int units = list.num_blocks * row_units;
  const int64_t cost = units + int64_t{shared_units} * (args.shared_cost - 1);
  const int64_t index = blockIdx.x;
  UnitRange range = {UnitAt(cost * index / gridDim.x, shared_units, args.shared_cost),
                     UnitAt(cost * (index + 1) / gridDim.x, shared_units, args.shared_cost), 0, 0,
                     0};
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

// The weights that a warp reads, stage by stage, as far ahead of their use as the ring is long.
template <ProductKind kKind, int kBlocks>
class WeightStream {
 public:
  static constexpr int kDepth = kStages<kBlocks>;

  __device__ __forceinline__ WeightStream(const ProductArgs& args, const UnitRange& range)
      : args_(args),
        job_(range.job),
        row_(range.row),
        block_(range.block),
        units_left_(range.end - range.begin) {
    group_ = first();
    if (group_ == last()) units_left_ = 0;
  }
  // The share of the inputs of this warp, in groups.
  __device__ __forceinline__ int first() const { return groups() * Split() / kSplits<kKind>; }
  __device__ __forceinline__ int last() const { return groups() * (Split() + 1) / kSplits<kKind>; }

  // Starts the next copy, if there is any left. By the whole warp, after __syncwarp(). What it
  // needs to know of the job is read again each time: registers are scarcer than loads from L1.
  __device__ __forceinline__ void Issue() {
    if (units_left_ <= 0) return;
    const Job& job = args_.scratch.jobs[job_];
    const JobWeight& w = kKind == ProductKind::kDown ? job.w2 : matrix_ == 0 ? job.w1 : job.w3;
    const int most = IsFp4(w.format) ? 2 : 1;
    const int count = last() - group_ < most ? last() - group_ : most;
    if (threadIdx.x % kWarpLanes == 0) {
      const int64_t row_tile = int64_t{row_} * kRowTiles<kKind> + WarpIndex() / kSplits<kKind>;
      const int group_bytes = GroupBytes(w.format);
      const uint8_t* from = w.tiles + (row_tile * groups() + group_) * group_bytes;
      const auto bytes = static_cast<unsigned>(count * group_bytes);
      Mbarrier* full = BarrierOf<kKind, kBlocks>(WarpIndex(), issued_);
      BarrierArriveExpect(full, bytes);
      BulkCopyOnce(StageOf<kBlocks>(WarpIndex(), issued_), from, bytes, full);
    }
    issued_ = issued_ + 1 == kDepth ? 0 : issued_ + 1;
    Advance(count);
  }
  // The oldest stage, when it has arrived.
  __device__ __forceinline__ const unsigned char* Wait() {
    BarrierWait(BarrierOf<kKind, kBlocks>(WarpIndex(), used_), parity_);
    return StageOf<kBlocks>(WarpIndex(), used_);
  }
  // It has been read: its place takes the next copy.
  __device__ __forceinline__ void Release() {
    used_ = used_ + 1 == kDepth ? 0 : used_ + 1;
    parity_ ^= used_ == 0 ? 1u : 0u;
    __syncwarp();
    Issue();
  }

 private:
  __device__ __forceinline__ static int Split() { return WarpIndex() % kSplits<kKind>; }
  __device__ __forceinline__ int groups() const { return args_.inputs / static_cast<int>(kGroup); }
  // The order in which MultiplyUnit asks.
  __device__ __forceinline__ void Advance(int groups) {
    if (kMatrices<kKind> == 2 && matrix_ == 0) {
      matrix_ = 1;
      return;
    }
    matrix_ = 0;
    group_ += groups;
    if (group_ < last()) return;
    group_ = first();
    --units_left_;
    const int32_t* first_block = args_.scratch.list->first_block + job_;
    if (++block_ < first_block[1] - first_block[0]) return;
    block_ = 0;
    if (++row_ * kRowTiles<kKind> * static_cast<int>(kPanelRows) < args_.outputs) return;
    row_ = 0;
    ++job_;
  }

  const ProductArgs& args_;
  int job_, row_, block_, group_;
  int matrix_ = 0;
  int units_left_;
  int issued_ = 0;
  int used_ = 0;
  unsigned parity_ = 0;
};

}  // namespace isthmus::kernels::grouped
