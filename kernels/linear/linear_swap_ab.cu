// SPDX-License-Identifier: Apache-2.0
// Patch linear.swap_ab: linears of at most 64 tokens, weights on the M axis of mma.sync, tokens on
// N, on sm_90 and sm_120 alike. Bound by reading the weights once: N * K bytes (fp8) or 2 N * K
// (bf16) at the rate of DRAM.
//
// Each multiprocessor takes an equal share of the line of units (linear_stream.cuh), so that no
// wave is ragged. A producer warp streams units through a ring of bulk copies, weights before the
// predecessor has ended; eight warps multiply, each 16 of the 128 outputs. The cut depends on the
// weights and the device alone, so a token's bits do not depend on the batch. Where they may, few
// tokens and small matrices are the work of linear_few_tokens.cu.
#include "kernels/core/workspace.h"
#include "kernels/linear/linear_stream.cuh"
#include "kernels/linear/linear_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

static_assert(kMaxTasks == kMaxLinearsTogether);
static_assert(kUnitRowTiles == kLinearWarps);

template <Product kProduct, int kTiles>
constexpr int kStageBytes = kUnitWeightBytes + (UnitBytes(kProduct, kTiles) + 127) / 128 * 128;
// What is left of the shared memory holds barriers.
template <Product kProduct, int kTiles>
constexpr int kStages = static_cast<int>((kMaxSharedBytes - 1024) / kStageBytes<kProduct, kTiles>);

// By one lane.
template <Product kProduct, int kTiles>
__device__ void FetchTokens(const StreamArgs& args, const Place& place, bool has_low,
                            unsigned char* stage, Mbarrier* full) {
  constexpr unsigned kHead = UnitHeadBytes(kProduct, kTiles);
  constexpr unsigned kLow = UnitBytes(kProduct, kTiles) - kHead;
  const uint8_t* tokens = TokensOf<kProduct, kTiles>(args, place);
  BarrierArriveExpect(full, kHead + (has_low ? kLow : 0));
  BulkCopy(stage + kUnitWeightBytes, tokens, kHead, full);
  if (has_low) BulkCopy(stage + kUnitWeightBytes + kHead, tokens + kHead, kLow, full);
}

template <Product kProduct, int kTiles>
__device__ void Produce(const StreamArgs& args, const Ring& ring, int begin, int count, int lane) {
  constexpr int kDepth = kStages<kProduct, kTiles>;
  constexpr int kBytes = kStageBytes<kProduct, kTiles>;
  Place place = PlaceOf(args, begin);
  for (int i = 0; i < min(count, kDepth); ++i) {
    FetchWeights<true>(args, place, ring.stages + i * kBytes, ring.full + i, lane);
    Advance(args, &place);
  }
  WaitForPredecessor();
  place = PlaceOf(args, begin);
  unsigned low = 0;  // Bit i: the low parts of the i-th of the next 32 units matter.
  for (int i = 0; i < count; ++i) {
    const int stage = i % kDepth;
    if (HasLowParts(kProduct) && i % kWarpLanes == 0) {
      low = __ballot_sync(
          kFullWarp,
          i + lane < count && HasLow<kProduct, kTiles>(args, PlaceOf(args, begin + i + lane)));
    }
    if (i >= kDepth) {
      BarrierWait(ring.empty + stage, static_cast<unsigned>(i / kDepth - 1) % 2);
      FetchWeights<true>(args, place, ring.stages + stage * kBytes, ring.full + stage, lane);
    }
    if (lane == 0) {
      FetchTokens<kProduct, kTiles>(args, place, (low >> (i % kWarpLanes) & 1) != 0,
                                    ring.stages + stage * kBytes, ring.full + stage);
    }
    __syncwarp();
    Advance(args, &place);
  }
  LetSuccessorStart();
}

// acc += the products of one unit's steps with the words at `words`.
template <Product kProduct, int kTiles>
__device__ __forceinline__ void MultiplyUnit(const unsigned char* weights,
                                             const unsigned char* words, int steps, int lane,
                                             float (&acc)[kTiles][4]) {
  constexpr int kCount = kTiles == 1 ? 1 : 2;
#pragma unroll
  for (int step = 0; step < kUnitSteps; ++step) {
    if (step >= steps) break;
    WeightFragment<kProduct> weight;
    weight.Load(weights + step * kTileCodeBytes + lane * 16);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += kCount) {
      TokenFragment<kProduct, kTiles, kCount> tokens;
      tokens.Load(words, step, tile, lane);
#pragma unroll
      for (int i = 0; i < kCount; ++i) MultiplyStep(acc[tile + i], weight, tokens.b[i]);
    }
  }
}

// total += the unit's products, a group's sums with both of its scales.
template <Product kProduct, int kTiles>
__device__ __forceinline__ void AddUnit(const unsigned char* stage, int warp, int lane, int steps,
                                        float weight_scale, float (&total)[kTiles][4]) {
  const unsigned char* weights = stage + warp * kTileUnitBytes;
  const unsigned char* words = stage + kUnitWeightBytes;
  float acc[kTiles][4] = {};
  MultiplyUnit<kProduct, kTiles>(weights, words, steps, lane, acc);
  if constexpr (HasLowParts(kProduct)) {
    if (*reinterpret_cast<const unsigned*>(words + UnitFlagByte(kProduct, kTiles)) != 0) {
      MultiplyUnit<kProduct, kTiles>(weights, words + UnitHeadBytes(kProduct, kTiles), steps, lane,
                                     acc);
    }
  }
  const unsigned char* scales = words + UnitWordBytes(kProduct, kTiles);
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    float2 scale = make_float2(1.0f, 1.0f);
    if constexpr (HasScales(kProduct)) {
      scale = *reinterpret_cast<const float2*>(scales + (8 * j + lane % 4 * 2) * 4);
    }
    const float even = scale.x * weight_scale;  // Powers of two: exact.
    const float odd = scale.y * weight_scale;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      total[j][c] = fmaf(acc[j][c], c % 2 == 0 ? even : odd, total[j][c]);
    }
  }
}

template <Product kProduct, int kTiles>
__device__ void Consume(const StreamArgs& args, const Ring& ring, int begin, int count, int warp,
                        int lane) {
  constexpr int kDepth = kStages<kProduct, kTiles>;
  float total[kTiles][4] = {};
  Place place = PlaceOf(args, begin);
  unsigned codes = 0;  // Lane i has the scale of the i-th of the next 32 units.
  for (int i = 0; i < count; ++i) {
    if (i % kWarpLanes == 0 && i + lane < count) {
      codes = ScaleCodeAt<kProduct>(args, PlaceOf(args, begin + i + lane), warp);
    }
    if (i == 0) WaitForPredecessor();
    const unsigned code = __shfl_sync(kFullWarp, codes, i % kWarpLanes);
    const int stage = i % kDepth;
    const LinearTask& task = args.tasks[place.task];
    const int row_tile = place.block * kUnitRowTiles + warp;
    BarrierWait(ring.full + stage, static_cast<unsigned>(i / kDepth) % 2);
    if (row_tile < task.row_tiles) {
      AddUnit<kProduct, kTiles>(ring.stages + stage * kStageBytes<kProduct, kTiles>, warp, lane,
                                StepsOf(args, place), Ue8m0Value(static_cast<uint8_t>(code)),
                                total);
    }
    __syncwarp();
    if (lane == 0) BarrierArrive(ring.empty + stage);

    if (place.unit + 1 == args.row_units || i + 1 == count) {
      const int64_t row_begin = int64_t{place.row} * args.row_units;
      const int first = OwnerOf(args, row_begin);
      const int last = OwnerOf(args, row_begin + args.row_units - 1);
      if (first == last || JoinParts(args, place.row, first, last, warp, lane, total)) {
        WriteFragments<kTiles>(args, task, row_tile * static_cast<int>(kPanelRows), 0, lane, total);
      }
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) total[j][c] = 0.0f;
      }
    }
    if (i + 1 < count) Advance(args, &place);
  }
}

// Grid: at most one block a multiprocessor, and a unit for each. Block: kLinearThreads. Shared
// memory: kStages stages. One block of tokens, at most 8 kTiles.
template <Product kProduct, int kTiles>
__global__ __launch_bounds__(kLinearThreads,
                             1) void LinearStreamK(const __grid_constant__ StreamArgs args) {
  __shared__ Mbarrier full[kStages<kProduct, kTiles>];
  __shared__ Mbarrier empty[kStages<kProduct, kTiles>];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const Ring ring = MakeRing(full, empty);
  const int begin = ShareBegin(args, blockIdx.x);
  const int count = ShareBegin(args, int64_t{blockIdx.x} + 1) - begin;
  if (warp == kLinearWarps) {
    Produce<kProduct, kTiles>(args, ring, begin, count, lane);
  } else {
    Consume<kProduct, kTiles>(args, ring, begin, count, warp, lane);
  }
}

// ---- Launching

// Blocks of the grid, by the weights and the device alone. Equal shares that end with the rows of
// units, or divide them, spare every block its second join, and a small matrix is not worth a
// block for each of its units: a unit takes a block about half a microsecond, and a part of a row
// the row's last block about 0.3.
int BlocksOf(const StreamArgs& args, int num_sms) {
  constexpr int64_t kUnitCost = 5;
  constexpr int64_t kPartCost = 3;
  const int64_t units = args.num_units;
  const int64_t row = args.row_units;
  int64_t blocks = std::min<int64_t>(num_sms, units);
  int64_t share = (units + blocks - 1) / blocks;
  int64_t best = share * kUnitCost + 2 * kPartCost * (1 + (row + share - 1) / share);
  for (share = (units + num_sms - 1) / num_sms; share * kUnitCost < best; ++share) {
    if (units % share != 0 || (row % share != 0 && share % row != 0)) continue;
    const int64_t parts = share < row ? row / share : 0;
    const int64_t cost = share * kUnitCost + parts * kPartCost;
    if (cost >= best) continue;
    best = cost;
    blocks = units / share;
  }
  return static_cast<int>(blocks);
}

template <Product kProduct, int kTiles>
absl::Status LaunchStream(const StreamArgs& args, unsigned blocks, const Exec& exec) {
  static_assert(kStages<kProduct, kTiles> >= 2);
  constexpr size_t kBytes =
      static_cast<size_t>(kStages<kProduct, kTiles>) * kStageBytes<kProduct, kTiles>;
  return Launch("LinearStreamK",
                {.grid = dim3(blocks),
                 .block = dim3(kLinearThreads),
                 .shared_bytes = kBytes,
                 .overlaps_predecessor = true},
                exec, LinearStreamK<kProduct, kTiles>, args);
}

template <Product kProduct>
absl::Status LaunchTiles(const StreamPlan& plan, unsigned blocks, const Exec& exec) {
  switch (plan.pack.tiles) {
    case 1:
      return LaunchStream<kProduct, 1>(plan.stream, blocks, exec);
    case 2:
      return LaunchStream<kProduct, 2>(plan.stream, blocks, exec);
    case 4:
      return LaunchStream<kProduct, 4>(plan.stream, blocks, exec);
    default:
      return LaunchStream<kProduct, 8>(plan.stream, blocks, exec);
  }
}

}  // namespace

absl::Status LaunchLinearManySwapAb(std::span<const LinearArgs> linears, const Exec& exec) {
  const int64_t tokens = linears[0].x.rows;
  const Product product = ProductOf(linears[0]);
  if (tokens == 0) return absl::OkStatus();
  if (exec.counters == nullptr || exec.workspace == nullptr) {
    return absl::FailedPreconditionError("linear: a GPU needs exec.counters and exec.workspace");
  }
  if (!exec.batch_invariant && FitsFewTokens(linears)) {
    return LaunchLinearManyFewTokens(linears, exec);
  }
  const int tiles = tokens <= 8 ? 1 : tokens <= 16 ? 2 : tokens <= 32 ? 4 : 8;
  StreamPlan plan = PlanStream(linears, tiles, exec);
  const int blocks = BlocksOf(plan.stream, exec.num_sms);
  Workspace::Scope scope(exec.workspace);
  plan.pack.units =
      scope.Take<uint8_t>(int64_t{plan.inputs} * plan.stream.row_units * UnitBytes(product, tiles));
  plan.stream.units = plan.pack.units;
  plan.stream.partials =
      scope.Take<float>(int64_t{blocks} * 2 * kLinearWarps * tiles * 4 * kWarpLanes);
  ISTHMUS_RETURN_IF_ERROR(LaunchPack(plan, product, exec));
  switch (product) {
    case Product::kE4m3:
      return LaunchTiles<Product::kE4m3>(plan, static_cast<unsigned>(blocks), exec);
    case Product::kE4m3ByF16:
      return LaunchTiles<Product::kE4m3ByF16>(plan, static_cast<unsigned>(blocks), exec);
    default:
      return LaunchTiles<Product::kBf16>(plan, static_cast<unsigned>(blocks), exec);
  }
}

absl::Status LaunchLinearSwapAb(const LinearArgs& args, const Exec& exec) {
  return LaunchLinearManySwapAb({&args, 1}, exec);
}

}  // namespace isthmus::kernels
