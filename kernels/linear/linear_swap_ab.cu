// SPDX-License-Identifier: Apache-2.0
// Patch linear.swap_ab: linears of at most 64 tokens, weights on the M axis of mma.sync, tokens on
// N, on sm_90 and sm_120 alike. Bound by reading the weights once: N * K bytes (fp8) or 2 N * K
// (bf16) at the rate of DRAM.
//
// The work is cut into units of 128 outputs x four k steps and laid in one line, outputs after
// outputs; each multiprocessor takes an equal share of the line (stream-K), so that no wave is
// ragged. A producer warp streams units through a ring of bulk copies, weights before the
// predecessor has ended; eight warps multiply, each 16 of the outputs. Where a row of units is
// shared by several blocks, the last of them to finish adds the parts in the order of the blocks.
// The cut depends on the weights and the device alone, so a token's bits do not depend on the
// batch.
//
// Letters: n output, k input, g = lane / 4, t = lane % 4 as in mma.cuh.
#include <algorithm>

#include "kernels/core/async_copy.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/weight_tiles.h"
#include "kernels/core/workspace.h"
#include "kernels/linear/linear_variants.h"
#include "kernels/linear/packed_tokens.cuh"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kWarps = 8;  // That multiply: a row of tiles each.
constexpr int kConsumers = kWarps * kWarpLanes;
constexpr int kThreads = kConsumers + kWarpLanes;
constexpr int kTileUnitBytes = kUnitSteps * static_cast<int>(kTileCodeBytes);
constexpr int kWeightBytes = kWarps * kTileUnitBytes;  // Of a unit.
constexpr int kConsumerBarrier = 1;
static_assert(kMaxTasks == kMaxLinearsTogether);

template <WeightFormat kFormat, int kTiles>
constexpr int kStageBytes = kWeightBytes + (UnitBytes(kFormat, kTiles) + 127) / 128 * 128;
// What is left of the shared memory holds barriers.
template <WeightFormat kFormat, int kTiles>
constexpr int kStages = static_cast<int>((kMaxSharedBytes - 1024) / kStageBytes<kFormat, kTiles>);

struct Task {
  const uint8_t* tiles;   // [row_tiles][tiles_in_row][512]
  const uint8_t* scales;  // fp8: [blocks of rows][scale_columns]
  float* out;             // [tokens, rows], rows out_stride apart
  int64_t out_stride;
  int rows;         // N
  int row_tiles;    // ceil(N / 16)
  int first_row;    // Of the scales.
  int input;        // Which packed x.
  int first_block;  // Of 128 outputs, among those of all tasks.
};

struct StreamArgs {
  Task tasks[kMaxTasks];
  const uint8_t* units;  // Packed tokens, [input][row_units][UnitBytes]
  float* partials;       // [blocks][2][kWarps][kTiles * 4][32]
  unsigned* counters;    // [blocks of outputs]
  int num_tasks;
  int tokens;
  int row_units;     // Units along K.
  int tiles_in_row;  // k steps along K.
  int scale_columns;
  int num_units;  // Of all tasks.
  bool round;
};

// A place on the line of units.
struct Place {
  int task;
  int block;  // Of 128 outputs, among those of all tasks.
  int unit;   // Along K.
};

__device__ Place PlaceOf(const StreamArgs& args, int index) {
  Place place = {0, index / args.row_units, index % args.row_units};
  while (place.task + 1 < args.num_tasks && args.tasks[place.task + 1].first_block <= place.block) {
    ++place.task;
  }
  return place;
}
__device__ void Advance(const StreamArgs& args, Place* place) {
  if (++place->unit < args.row_units) return;
  place->unit = 0;
  ++place->block;
  if (place->task + 1 < args.num_tasks && args.tasks[place->task + 1].first_block <= place->block) {
    ++place->task;
  }
}
// Units [ShareBegin(c), ShareBegin(c + 1)) are block c's.
__device__ int ShareBegin(const StreamArgs& args, int64_t c) {
  return static_cast<int>(c * args.num_units / gridDim.x);
}
__device__ int OwnerOf(const StreamArgs& args, int64_t index) {
  return static_cast<int>(((index + 1) * gridDim.x - 1) / args.num_units);
}

struct Ring {
  unsigned char* stages;  // [kStages][kStageBytes]
  Mbarrier* full;         // [kStages]: one arrival for weights, one for tokens.
  Mbarrier* empty;        // [kStages]: one arrival a consumer warp.
};

// By the whole producer warp: the rows of tiles of a unit, a copy a lane.
__device__ void FetchWeights(const StreamArgs& args, const Place& place, unsigned char* stage,
                             Mbarrier* full, int lane) {
  const Task& task = args.tasks[place.task];
  const int first = (place.block - task.first_block) * kWarps;
  const int active = min(kWarps, task.row_tiles - first);
  const int steps = min(kUnitSteps, args.tiles_in_row - place.unit * kUnitSteps);
  const auto bytes = static_cast<unsigned>(steps * kTileCodeBytes);
  if (lane == 0) BarrierArriveExpect(full, static_cast<unsigned>(active) * bytes);
  __syncwarp();
  if (lane >= active) return;
  const int64_t tile = int64_t{first + lane} * args.tiles_in_row + int64_t{place.unit} * kUnitSteps;
  BulkCopyOnce(stage + lane * kTileUnitBytes, task.tiles + tile * kTileCodeBytes, bytes, full);
}

template <WeightFormat kFormat, int kTiles>
__device__ const uint8_t* TokensOf(const StreamArgs& args, const Place& place) {
  const int64_t input = args.tasks[place.task].input;
  return args.units + (input * args.row_units + place.unit) * UnitBytes(kFormat, kTiles);
}
// Whether the low parts of a bf16 unit matter.
template <WeightFormat kFormat, int kTiles>
__device__ bool HasLow(const StreamArgs& args, const Place& place) {
  if constexpr (kFormat == WeightFormat::kFp8Block128) return false;
  const uint8_t* tokens = TokensOf<kFormat, kTiles>(args, place);
  return __ldcg(reinterpret_cast<const unsigned*>(tokens + UnitWordBytes(kTiles))) != 0;
}

// By one lane.
template <WeightFormat kFormat, int kTiles>
__device__ void FetchTokens(const StreamArgs& args, const Place& place, bool has_low,
                            unsigned char* stage, Mbarrier* full) {
  constexpr unsigned kHead = UnitHeadBytes(kFormat, kTiles);
  constexpr unsigned kLow = UnitBytes(kFormat, kTiles) - kHead;
  const uint8_t* tokens = TokensOf<kFormat, kTiles>(args, place);
  BarrierArriveExpect(full, kHead + (has_low ? kLow : 0));
  BulkCopy(stage + kWeightBytes, tokens, kHead, full);
  if (has_low) BulkCopy(stage + kWeightBytes + kHead, tokens + kHead, kLow, full);
}

template <WeightFormat kFormat, int kTiles>
__device__ void Produce(const StreamArgs& args, const Ring& ring, int begin, int count, int lane) {
  constexpr int kDepth = kStages<kFormat, kTiles>;
  constexpr int kBytes = kStageBytes<kFormat, kTiles>;
  Place ahead = PlaceOf(args, begin);  // Of the weights, up to kDepth units before the tokens.
  for (int i = 0; i < min(count, kDepth); ++i) {
    FetchWeights(args, ahead, ring.stages + i * kBytes, ring.full + i, lane);
    Advance(args, &ahead);
  }
  WaitForPredecessor();
  Place place = PlaceOf(args, begin);
  bool has_low = HasLow<kFormat, kTiles>(args, place);
  for (int i = 0; i < count; ++i) {
    const int stage = i % kDepth;
    Place next = place;
    Advance(args, &next);
    const bool next_has_low = i + 1 < count && HasLow<kFormat, kTiles>(args, next);
    if (i >= kDepth) {
      BarrierWait(ring.empty + stage, static_cast<unsigned>(i / kDepth - 1) % 2);
      FetchWeights(args, place, ring.stages + stage * kBytes, ring.full + stage, lane);
    }
    if (lane == 0) {
      FetchTokens<kFormat, kTiles>(args, place, has_low, ring.stages + stage * kBytes,
                                   ring.full + stage);
    }
    __syncwarp();
    place = next;
    has_low = next_has_low;
  }
  LetSuccessorStart();
}

// acc += the products of one unit's steps with the words at `words`.
template <WeightFormat kFormat, int kTiles>
__device__ __forceinline__ void MultiplyUnit(const unsigned char* weights,
                                             const unsigned char* words, int steps, int lane,
                                             float (&acc)[kTiles][4]) {
#pragma unroll
  for (int step = 0; step < kUnitSteps; ++step) {
    if (step >= steps) break;
    const uint4 tile = *reinterpret_cast<const uint4*>(weights + step * 512 + lane * 16);
    const uint32_t a[4] = {tile.x, tile.y, tile.z, tile.w};
    const auto multiply = [&](float(&c)[4], uint32_t b0, uint32_t b1) {
      const uint32_t b[2] = {b0, b1};
      if constexpr (kFormat == WeightFormat::kFp8Block128) {
        MmaE4m3(c, a, b);
      } else {
        MmaBf16(c, a, b);
      }
    };
    if constexpr (kTiles == 1) {
      const uint2 b = *reinterpret_cast<const uint2*>(words + (step * kWarpLanes + lane) * 8);
      multiply(acc[0], b.x, b.y);
    } else {
#pragma unroll
      for (int pair = 0; pair < kTiles / 2; ++pair) {
        const int place = (step * (kTiles / 2) + pair) * kWarpLanes + lane;
        const uint4 b = *reinterpret_cast<const uint4*>(words + place * 16);
        multiply(acc[2 * pair], b.x, b.y);
        multiply(acc[2 * pair + 1], b.z, b.w);
      }
    }
  }
}

// total += the unit's products: fp8 sums of a group with both of its scales.
template <WeightFormat kFormat, int kTiles>
__device__ __forceinline__ void AddUnit(const unsigned char* stage, int warp, int lane, int steps,
                                        float weight_scale, float (&total)[kTiles][4]) {
  const unsigned char* weights = stage + warp * kTileUnitBytes;
  const unsigned char* words = stage + kWeightBytes;
  float acc[kTiles][4] = {};
  MultiplyUnit<kFormat, kTiles>(weights, words, steps, lane, acc);
  const unsigned char* tail = words + UnitWordBytes(kTiles);
  if constexpr (kFormat == WeightFormat::kFp8Block128) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      const float2 scale = *reinterpret_cast<const float2*>(tail + (8 * j + lane % 4 * 2) * 4);
      const float even = scale.x * weight_scale;  // Powers of two: exact.
      const float odd = scale.y * weight_scale;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        total[j][c] = fmaf(acc[j][c], c % 2 == 0 ? even : odd, total[j][c]);
      }
    }
  } else {
    if (*reinterpret_cast<const unsigned*>(tail) != 0) {
      MultiplyUnit<kFormat, kTiles>(weights, tail + 16, steps, lane, acc);
    }
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) total[j][c] += acc[j][c];
    }
  }
}

template <int kTiles>
__device__ void WriteOutputs(const StreamArgs& args, const Place& place, int warp, int lane,
                             const float (&total)[kTiles][4]) {
  const Task& task = args.tasks[place.task];
  const int row = ((place.block - task.first_block) * kWarps + warp) * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int n = row + (c >= 2 ? 8 : 0);
      const int token = 8 * j + lane % 4 * 2 + c % 2;
      if (n >= task.rows || token >= args.tokens) continue;
      const float value = args.round ? RoundBf16(total[j][c]) : total[j][c];
      task.out[token * task.out_stride + n] = value;
    }
  }
}

// The sums of a row of units that blocks [first, last] share: leaves this block's part and, if all
// others have, adds them up and writes. By all consumer warps.
template <int kTiles>
__device__ void JoinParts(const StreamArgs& args, const Place& place, int first, int last, int warp,
                          int lane, float (&total)[kTiles][4]) {
  __shared__ unsigned turn;
  const auto part = [&](int block) {
    const bool is_first_row = ShareBegin(args, block) / args.row_units == place.block;
    return args.partials +
           ((int64_t{block} * 2 + (is_first_row ? 0 : 1)) * kWarps + warp) * (kTiles * 4) *
               kWarpLanes +
           lane;
  };
  float* mine = part(static_cast<int>(blockIdx.x));
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) __stcg(mine + (4 * j + c) * kWarpLanes, total[j][c]);
  }
  const auto blocks = static_cast<unsigned>(last - first + 1);
  __threadfence();
  SyncThreads(kConsumerBarrier, kConsumers);
  if (threadIdx.x == 0) turn = atomicInc(args.counters + place.block, blocks - 1);
  SyncThreads(kConsumerBarrier, kConsumers);
  const bool is_last = turn == blocks - 1;
  SyncThreads(kConsumerBarrier, kConsumers);  // Before `turn` is written again.
  if (!is_last) return;
  __threadfence();
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) total[j][c] = 0.0f;
  }
  for (int block = first; block <= last; ++block) {
    const float* other = part(block);
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) total[j][c] += __ldcg(other + (4 * j + c) * kWarpLanes);
    }
  }
  WriteOutputs<kTiles>(args, place, warp, lane, total);
}

// Scale of the weights of `warp` at a place, as stored.
__device__ unsigned ScaleAt(const StreamArgs& args, const Place& place, int warp) {
  const Task& task = args.tasks[place.task];
  const int n = ((place.block - task.first_block) * kWarps + warp) * 16;
  if (n >= task.rows) return 0;
  return __ldg(task.scales + int64_t{(task.first_row + n) / 128} * args.scale_columns + place.unit);
}

template <WeightFormat kFormat, int kTiles>
__device__ void Consume(const StreamArgs& args, const Ring& ring, int begin, int count, int warp,
                        int lane) {
  constexpr int kDepth = kStages<kFormat, kTiles>;
  float total[kTiles][4] = {};
  Place place = PlaceOf(args, begin);
  unsigned scales = 0;  // Lane i has that of the i-th of the next 32 units.
  for (int i = 0; i < count; ++i) {
    if constexpr (kFormat == WeightFormat::kFp8Block128) {
      if (i % kWarpLanes == 0 && i + lane < count) {
        scales = ScaleAt(args, PlaceOf(args, begin + i + lane), warp);
      }
    }
    if (i == 0) WaitForPredecessor();
    unsigned code = 0;
    if constexpr (kFormat == WeightFormat::kFp8Block128) {
      code = __shfl_sync(kFullWarp, scales, i % kWarpLanes);
    }
    const int stage = i % kDepth;
    const int steps = min(kUnitSteps, args.tiles_in_row - place.unit * kUnitSteps);
    const Task& task = args.tasks[place.task];
    BarrierWait(ring.full + stage, static_cast<unsigned>(i / kDepth) % 2);
    if ((place.block - task.first_block) * kWarps + warp < task.row_tiles) {
      AddUnit<kFormat, kTiles>(ring.stages + stage * kStageBytes<kFormat, kTiles>, warp, lane,
                               steps, Ue8m0Value(static_cast<uint8_t>(code)), total);
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(ring.empty + stage);

    if (place.unit + 1 == args.row_units || i + 1 == count) {
      const int64_t row_begin = int64_t{place.block} * args.row_units;
      const int first = OwnerOf(args, row_begin);
      const int last = OwnerOf(args, row_begin + args.row_units - 1);
      if (first == last) {
        WriteOutputs<kTiles>(args, place, warp, lane, total);
      } else {
        JoinParts<kTiles>(args, place, first, last, warp, lane, total);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) total[j][c] = 0.0f;
      }
    }
    Advance(args, &place);
  }
}

// Grid: at most one block a multiprocessor, and a unit for each. Block: kThreads. Shared memory:
// kStages stages. tokens <= 8 kTiles.
template <WeightFormat kFormat, int kTiles>
__global__ __launch_bounds__(kThreads,
                             1) void LinearStreamK(const __grid_constant__ StreamArgs args) {
  constexpr int kDepth = kStages<kFormat, kTiles>;
  __shared__ Mbarrier full[kDepth];
  __shared__ Mbarrier empty[kDepth];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kDepth; ++i) {
      BarrierInit(&full[i], 2);
      BarrierInit(&empty[i], kWarps);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  const Ring ring = {DynamicShared(), full, empty};
  const int begin = ShareBegin(args, blockIdx.x);
  const int count = ShareBegin(args, int64_t{blockIdx.x} + 1) - begin;
  if (warp == kWarps) {
    Produce<kFormat, kTiles>(args, ring, begin, count, lane);
  } else {
    Consume<kFormat, kTiles>(args, ring, begin, count, warp, lane);
  }
}

// ---- Launching

template <WeightFormat kFormat, int kTiles>
absl::Status LaunchStream(const StreamArgs& args, unsigned blocks, const Exec& exec) {
  static_assert(kStages<kFormat, kTiles> >= 3);
  return Launch(
      "LinearStreamK",
      {.grid = dim3(blocks),
       .block = dim3(kThreads),
       .shared_bytes = static_cast<size_t>(kStages<kFormat, kTiles>) * kStageBytes<kFormat, kTiles>,
       .overlaps_predecessor = true},
      exec, LinearStreamK<kFormat, kTiles>, args);
}

template <WeightFormat kFormat>
absl::Status LaunchFormat(const PackArgs& pack, int inputs, const StreamArgs& args, unsigned blocks,
                          const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(
      Launch("PackTokens",
             {.grid = dim3(static_cast<unsigned>(args.row_units), static_cast<unsigned>(inputs)),
              .block = dim3(kPackWarps * kWarpLanes),
              .overlaps_predecessor = true},
             exec, PackTokens<kFormat>, pack));
  switch (pack.tiles) {
    case 1:
      return LaunchStream<kFormat, 1>(args, blocks, exec);
    case 2:
      return LaunchStream<kFormat, 2>(args, blocks, exec);
    case 4:
      return LaunchStream<kFormat, 4>(args, blocks, exec);
    default:
      return LaunchStream<kFormat, 8>(args, blocks, exec);
  }
}

int TokenTiles(int64_t tokens) { return tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8; }

}  // namespace

absl::Status LaunchLinearManySwapAb(std::span<const LinearArgs> linears, const Exec& exec) {
  const LinearArgs& first = linears[0];
  const WeightFormat format = first.weight.format;
  if (first.x.rows == 0) return absl::OkStatus();
  if (exec.counters == nullptr || exec.workspace == nullptr) {
    return absl::FailedPreconditionError("linear: a GPU needs exec.counters and exec.workspace");
  }
  StreamArgs args = {};
  PackArgs pack = {};
  int inputs = 0;
  int64_t blocks = 0;
  for (const LinearArgs& linear : linears) {
    const WeightView& w = linear.weight;
    if (w.rows == 0) continue;
    int input = 0;
    while (input < inputs &&
           (pack.x[input] != linear.x.f32(0) || pack.x_stride[input] != linear.x.row_stride)) {
      ++input;
    }
    if (input == inputs) {
      pack.x[inputs] = linear.x.f32(0);
      pack.x_stride[inputs++] = linear.x.row_stride;
    }
    args.tasks[args.num_tasks++] = {static_cast<const uint8_t*>(w.elements),
                                    w.scales,
                                    linear.out.f32(0),
                                    linear.out.row_stride,
                                    static_cast<int>(w.rows),
                                    static_cast<int>(CeilDiv(w.rows, kPanelRows)),
                                    static_cast<int>(w.first_row),
                                    input,
                                    static_cast<int>(blocks)};
    blocks += CeilDiv(w.rows, kPanelRows * kWarps);
  }
  if (blocks == 0) return absl::OkStatus();
  const WeightView& w = first.weight;
  args.tokens = pack.tokens = static_cast<int>(first.x.rows);
  pack.tiles = TokenTiles(first.x.rows);
  pack.cols = w.cols;
  args.row_units = static_cast<int>(CeilDiv(w.cols, UnitInputs(format)));
  args.tiles_in_row = static_cast<int>(TilesInRow(w));
  args.scale_columns = static_cast<int>(ScaleColumns(w));
  args.num_units = static_cast<int>(blocks) * args.row_units;
  args.round = first.round_output;
  args.counters = exec.counters;

  const int grid = std::min(exec.num_sms, args.num_units);
  Workspace::Scope scope(exec.workspace);
  const int64_t unit_bytes = UnitBytes(format, pack.tiles);
  pack.units = scope.Take<uint8_t>(inputs * args.row_units * unit_bytes);
  args.units = pack.units;
  args.partials = scope.Take<float>(int64_t{grid} * 2 * kWarps * pack.tiles * 4 * kWarpLanes);
  if (format == WeightFormat::kBf16) {
    return LaunchFormat<WeightFormat::kBf16>(pack, inputs, args, static_cast<unsigned>(grid), exec);
  }
  return LaunchFormat<WeightFormat::kFp8Block128>(pack, inputs, args, static_cast<unsigned>(grid),
                                                  exec);
}

absl::Status LaunchLinearSwapAb(const LinearArgs& args, const Exec& exec) {
  return LaunchLinearManySwapAb({&args, 1}, exec);
}

}  // namespace isthmus::kernels
