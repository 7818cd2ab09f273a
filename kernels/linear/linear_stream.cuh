// SPDX-License-Identifier: Apache-2.0
// What the tensor-core kernels of linear share: the work as one line of units, cut into equal
// shares (stream-K), and the ring through which a producer warp streams them.
//
// A unit is 128 outputs x a block of tokens x four k steps. Along the line k runs fastest, then the
// blocks of tokens, then those of outputs, then the linears of the launch. The units of one block
// of outputs and of tokens are a row; where several blocks of the grid share a row, the last of
// them to finish adds the parts in the order of the line.
#pragma once

#include <algorithm>
#include <span>

#include "kernels/core/async_copy.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/core/weight_tiles.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/packed_tokens.cuh"

namespace isthmus::kernels {

inline constexpr int kLinearWarps = 8;  // That multiply.
inline constexpr int kLinearConsumers = kLinearWarps * kWarpLanes;
inline constexpr int kLinearThreads = kLinearConsumers + kWarpLanes;  // And the producer.
inline constexpr int kUnitRowTiles = 8;                               // 128 outputs.
inline constexpr int kTileUnitBytes = kUnitSteps * static_cast<int>(kTileCodeBytes);
inline constexpr int kUnitWeightBytes = kUnitRowTiles * kTileUnitBytes;
inline constexpr int kConsumerBarrier = 1;

struct LinearTask {
  const uint8_t* tiles;   // [row_tiles][tiles_in_row][512]
  const uint8_t* scales;  // fp8: [blocks of rows][scale_columns]
  float* out;             // [tokens, rows], rows out_stride apart
  int64_t out_stride;
  int rows;         // N
  int row_tiles;    // ceil(N / 16)
  int first_row;    // Of the scales.
  int input;        // Which packed x.
  int first_block;  // Of 128 outputs, among those of all tasks.
  bool round;
};

struct StreamArgs {
  LinearTask tasks[kMaxTasks];
  const uint8_t* units;  // Packed tokens, [input][token_blocks][row_units][UnitBytes]
  float* partials;       // [blocks of the grid][2][kLinearWarps][sums of a lane][32]
  unsigned* counters;    // [rows of units]
  int num_tasks;
  int tokens;
  int token_blocks;
  int row_units;     // Units along K.
  int tiles_in_row;  // k steps along K.
  int scale_columns;
  int num_units;  // Of all tasks.
};

// A place on the line.
struct Place {
  int task;
  int block;  // Of 128 outputs, in the task.
  int token_block;
  int row;   // Of units.
  int unit;  // In the row.
};

__device__ inline Place PlaceOf(const StreamArgs& args, int index) {
  Place place = {};
  place.row = index / args.row_units;
  place.unit = index % args.row_units;
  const int block = place.row / args.token_blocks;
  place.token_block = place.row % args.token_blocks;
  while (place.task + 1 < args.num_tasks && args.tasks[place.task + 1].first_block <= block) {
    ++place.task;
  }
  place.block = block - args.tasks[place.task].first_block;
  return place;
}
__device__ inline void Advance(const StreamArgs& args, Place* place) {
  if (++place->unit == args.row_units) *place = PlaceOf(args, (place->row + 1) * args.row_units);
}
// Units [ShareBegin(c), ShareBegin(c + 1)) are those of the grid's block c.
__device__ inline int ShareBegin(const StreamArgs& args, int64_t c) {
  return static_cast<int>(c * args.num_units / gridDim.x);
}
__device__ inline int OwnerOf(const StreamArgs& args, int64_t index) {
  return static_cast<int>(((index + 1) * gridDim.x - 1) / args.num_units);
}

struct Ring {
  unsigned char* stages;  // Each the weights of a unit, then its tokens.
  Mbarrier* full;         // One arrival for the weights, one for the tokens.
  Mbarrier* empty;        // One arrival a consumer warp.
};

// By all threads of the block; `full` and `empty` are shared memory.
template <int kDepth>
__device__ Ring MakeRing(Mbarrier (&full)[kDepth], Mbarrier (&empty)[kDepth]) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDepth; ++i) {
      BarrierInit(&full[i], 2);
      BarrierInit(&empty[i], kLinearWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  return {DynamicShared(), full, empty};
}

__device__ inline int StepsOf(const StreamArgs& args, const Place& place) {
  return min(kUnitSteps, args.tiles_in_row - place.unit * kUnitSteps);
}

// By the whole producer warp: the rows of tiles of a unit, a copy a lane. kOnce: nobody else reads
// them.
template <bool kOnce>
__device__ void FetchWeights(const StreamArgs& args, const Place& place, unsigned char* stage,
                             Mbarrier* full, int lane) {
  const LinearTask& task = args.tasks[place.task];
  const int first = place.block * kUnitRowTiles;
  const int active = min(kUnitRowTiles, task.row_tiles - first);
  const auto bytes = static_cast<unsigned>(StepsOf(args, place) * kTileCodeBytes);
  if (lane == 0) BarrierArriveExpect(full, static_cast<unsigned>(active) * bytes);
  __syncwarp();
  if (lane >= active) return;
  const int64_t tile = int64_t{first + lane} * args.tiles_in_row + int64_t{place.unit} * kUnitSteps;
  const uint8_t* from = task.tiles + tile * kTileCodeBytes;
  if constexpr (kOnce) {
    BulkCopyOnce(stage + lane * kTileUnitBytes, from, bytes, full);
  } else {
    BulkCopy(stage + lane * kTileUnitBytes, from, bytes, full);
  }
}

template <Product kProduct, int kTiles>
__device__ const uint8_t* TokensOf(const StreamArgs& args, const Place& place) {
  const int64_t block =
      int64_t{args.tasks[place.task].input} * args.token_blocks + place.token_block;
  return args.units + (block * args.row_units + place.unit) * UnitBytes(kProduct, kTiles);
}
// Whether the low parts of a unit matter.
template <Product kProduct, int kTiles>
__device__ bool HasLow(const StreamArgs& args, const Place& place) {
  if constexpr (!HasLowParts(kProduct)) return false;
  const uint8_t* tokens = TokensOf<kProduct, kTiles>(args, place);
  return __ldcg(reinterpret_cast<const unsigned*>(tokens + UnitFlagByte(kProduct, kTiles))) != 0;
}

// Of the weights of row tile `row_tile` of a unit, as stored; 1 in a tile that does not exist.
template <Product kProduct>
__device__ uint8_t ScaleCodeAt(const StreamArgs& args, const Place& place, int row_tile) {
  const LinearTask& task = args.tasks[place.task];
  const int n = (place.block * kUnitRowTiles + row_tile) * static_cast<int>(kPanelRows);
  if (!HasScales(kProduct) || n >= task.rows) return 127;
  return __ldg(task.scales + int64_t{(task.first_row + n) / 128} * args.scale_columns + place.unit);
}

// A row of tiles' weights of a step as A operands; two of m16n8k16 for one of m16n8k32 of fp8.
template <Product kProduct>
struct WeightFragment {
  static constexpr int kParts = kProduct == Product::kE4m3ByF16 ? 2 : 1;
  uint32_t a[kParts][4];

  // `tile` is the lane's 16 bytes.
  __device__ __forceinline__ void Load(const unsigned char* tile) {
    const uint4 words = *reinterpret_cast<const uint4*>(tile);
    if constexpr (kProduct == Product::kE4m3ByF16) {
      const uint32_t stored[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint32_t low = stored[2 * part];       // Row g.
        const uint32_t high = stored[2 * part + 1];  // Row g + 8.
        a[part][0] = F16PairOfE4m3(low & 0xffffu);
        a[part][1] = F16PairOfE4m3(high & 0xffffu);
        a[part][2] = F16PairOfE4m3(low >> 16);
        a[part][3] = F16PairOfE4m3(high >> 16);
      }
    } else {
      a[0][0] = words.x;
      a[0][1] = words.y;
      a[0][2] = words.z;
      a[0][3] = words.w;
    }
  }
};

// The B operands of a step for kCount neighbouring tiles of tokens, of a unit of kTiles.
template <Product kProduct, int kTiles, int kCount>
struct TokenFragment {
  static constexpr int kParts = WeightFragment<kProduct>::kParts;
  uint32_t b[kCount][kParts][2];

  // `words` are the unit's.
  __device__ __forceinline__ void Load(const unsigned char* words, int step, int tile, int lane) {
    if constexpr (kProduct == Product::kE4m3ByF16) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int place = WordInUnit(kProduct, kTiles, step, tile + i, lane, 0);
        const uint4 v = *reinterpret_cast<const uint4*>(words + place * 4);
        b[i][0][0] = v.x;
        b[i][0][1] = v.y;
        b[i][1][0] = v.z;
        b[i][1][1] = v.w;
      }
    } else if constexpr (kTiles == 1) {
      const int place = WordInUnit(kProduct, 1, step, 0, lane, 0);
      const uint2 v = *reinterpret_cast<const uint2*>(words + place * 4);
      b[0][0][0] = v.x;
      b[0][0][1] = v.y;
    } else {
      static_assert(kCount == 2);
      const int place = WordInUnit(kProduct, kTiles, step, tile, lane, 0);
      const uint4 v = *reinterpret_cast<const uint4*>(words + place * 4);
      b[0][0][0] = v.x;
      b[0][0][1] = v.y;
      b[1][0][0] = v.z;
      b[1][0][1] = v.w;
    }
  }
};

template <Product kProduct>
__device__ __forceinline__ void MultiplyStep(
    float (&c)[4], const WeightFragment<kProduct>& weight,
    const uint32_t (&b)[WeightFragment<kProduct>::kParts][2]) {
  if constexpr (kProduct == Product::kE4m3) {
    MmaE4m3(c, weight.a[0], b[0]);
  } else if constexpr (kProduct == Product::kBf16) {
    MmaBf16(c, weight.a[0], b[0]);
  } else {
    MmaF16(c, weight.a[0], b[0]);
    MmaF16(c, weight.a[1], b[1]);
  }
}

// The sums of a row that the grid's blocks [first, last] share: leaves this block's part and, if
// all others have left theirs, adds them in order. True: `total` is the sum. By all consumer warps.
template <int kFragments>
__device__ bool JoinParts(const StreamArgs& args, int row, int first, int last, int warp, int lane,
                          float (&total)[kFragments][4]) {
  __shared__ unsigned turn;
  constexpr int kSums = kFragments * 4;
  constexpr int kTogether =
      kSums <= 32 ? std::min(8, 64 / kSums) : 1;  // Parts on their way at a time.
  const auto part = [&](int block) {
    const bool is_its_first = ShareBegin(args, block) / args.row_units == row;
    const int64_t place = (int64_t{block} * 2 + (is_its_first ? 0 : 1)) * kLinearWarps + warp;
    return args.partials + place * kSums * kWarpLanes + lane;
  };
  float* mine = part(static_cast<int>(blockIdx.x));
#pragma unroll
  for (int i = 0; i < kSums; ++i) __stcg(mine + i * kWarpLanes, total[i / 4][i % 4]);
  const auto blocks = static_cast<unsigned>(last - first + 1);
  __threadfence();
  SyncThreads(kConsumerBarrier, kLinearConsumers);
  if (threadIdx.x == 0) turn = atomicInc(args.counters + row, blocks - 1);
  SyncThreads(kConsumerBarrier, kLinearConsumers);
  const bool is_last = turn == blocks - 1;
  SyncThreads(kConsumerBarrier, kLinearConsumers);  // Before `turn` is written again.
  if (!is_last) return false;
  __threadfence();
#pragma unroll
  for (int i = 0; i < kSums; ++i) total[i / 4][i % 4] = 0.0f;
  if constexpr (kTogether == 1) {
    for (int block = first; block <= last; ++block) {
      const float* from = part(block);
#pragma unroll
      for (int i = 0; i < kSums; ++i) total[i / 4][i % 4] += __ldcg(from + i * kWarpLanes);
    }
  } else {
    for (int begin = first; begin <= last; begin += kTogether) {
      float value[kTogether][kSums];
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        const float* from = part(min(begin + p, last));
#pragma unroll
        for (int i = 0; i < kSums; ++i) value[p][i] = __ldcg(from + i * kWarpLanes);
      }
#pragma unroll
      for (int p = 0; p < kTogether; ++p) {
        if (begin + p > last) break;
#pragma unroll
        for (int i = 0; i < kSums; ++i) total[i / 4][i % 4] += value[p][i];
      }
    }
  }
  return true;
}

// Fragments of one row of tiles, for consecutive tiles of tokens from `token` on.
template <int kFragments>
__device__ void WriteFragments(const StreamArgs& args, const LinearTask& task, int row, int token,
                               int lane, const float (*total)[4]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int n = row + lane / 4 + (c >= 2 ? 8 : 0);
      const int t = token + 8 * j + lane % 4 * 2 + c % 2;
      if (n >= task.rows || t >= args.tokens) continue;
      task.out[t * task.out_stride + n] = task.round ? RoundBf16(total[j][c]) : total[j][c];
    }
  }
}

// ---- The host's part

struct StreamPlan {
  StreamArgs stream;
  PackArgs pack;
  int inputs = 0;
};
// What the linears' weights and inputs ask for.
Product ProductOf(const LinearArgs& args);
// Everything but the memory: all linears have the shape and format of the first, and rows.
StreamPlan PlanStream(std::span<const LinearArgs> linears, int token_tiles, const Exec& exec);
// Packs the tokens of all inputs.
absl::Status LaunchPack(const StreamPlan& plan, Product product, const Exec& exec);

}  // namespace isthmus::kernels
