// SPDX-License-Identifier: Apache-2.0
// Patch linear.tiles_large: linears of more than 64 tokens (prefill), on sm_90 and sm_120 alike.
// Bound by mma.sync: 2 * tokens * N * K operations at 1,516 (e4m3) or 643 (bf16) TFLOP/s of an
// H200.
//
// Tiles of 128 outputs x 128 tokens, a warp 32 x 64 of them: both operands come from shared memory
// in the order of their fragments, 12 KB a warp for 64 products. Units stream through the ring of
// linear_stream.cuh, shared equally among the multiprocessors. Low parts of bf16 tokens that are
// not on the grid follow as a stage of their own.
#include <array>

#include "kernels/core/workspace.h"
#include "kernels/linear/linear_stream.cuh"
#include "kernels/linear/linear_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int kTokenTiles = 16;     // Of a block of tokens: 128.
constexpr int kWarpRowTiles = 2;    // Of a warp, and
constexpr int kWarpTokenTiles = 8;  // its tiles of tokens.
constexpr int kFragments = kWarpRowTiles * kWarpTokenTiles;
constexpr int kThreads = kLinearConsumers + 4 * kWarpLanes;
constexpr int kWarpsAlongRows = kUnitRowTiles / kWarpRowTiles;
static_assert(kWarpsAlongRows * (kTokenTiles / kWarpTokenTiles) == kLinearWarps);

// Packed tokens of one launch, at most: eight inputs of a long prompt would be a gigabyte.
constexpr int64_t kMaxPackedBytes = int64_t{256} << 20;

// The words of a unit and its tail; the low parts use a stage of their own.
template <Product kProduct>
constexpr int kStageBytes = kUnitWeightBytes +
                            (UnitHeadBytes(kProduct, kTokenTiles) + 127) / 128 * 128;
template <Product kProduct>
constexpr int kStages = static_cast<int>((kMaxSharedBytes - 1024) / kStageBytes<kProduct>);

static_assert(kStages<Product::kE4m3> == 3 && kStages<Product::kBf16> == 3 &&
              kStages<Product::kE4m3ByF16> == 2);

// The next stage of a ring, counted on both sides.
template <int kDepth>
struct Turn {
  int index = 0;
  __device__ int stage() const { return index % kDepth; }
  __device__ unsigned parity() const { return static_cast<unsigned>(index / kDepth) % 2; }
};

// Fills one stage, by the whole producer warp.
template <Product kProduct>
__device__ void Fill(const StreamArgs& args, const Ring& ring, const Place& place, bool is_low,
                     Turn<kStages<kProduct>>* turn, int lane) {
  const int stage = turn->stage();
  if (turn->index >= kStages<kProduct>) BarrierWait(ring.empty + stage, turn->parity() ^ 1u);
  unsigned char* target = ring.stages + stage * kStageBytes<kProduct>;
  FetchWeights<false>(args, place, target, ring.full + stage, lane);
  if (lane == 0) {
    constexpr unsigned kHead = UnitHeadBytes(kProduct, kTokenTiles);
    constexpr unsigned kWords = UnitWordBytes(kProduct, kTokenTiles);
    const uint8_t* tokens = TokensOf<kProduct, kTokenTiles>(args, place);
    BarrierArriveExpect(ring.full + stage, kHead);
    BulkCopy(target + kUnitWeightBytes, is_low ? tokens + kHead : tokens, kWords,
             ring.full + stage);
    // The scales, which both have, and the flag.
    BulkCopy(target + kUnitWeightBytes + kWords, tokens + kWords, kHead - kWords,
             ring.full + stage);
  }
  __syncwarp();
  ++turn->index;
}

template <Product kProduct>
__device__ void Produce(const StreamArgs& args, const Ring& ring, int begin, int count, int lane) {
  WaitForPredecessor();
  Turn<kStages<kProduct>> turn;
  Place place = PlaceOf(args, begin);
  bool has_low = HasLow<kProduct, kTokenTiles>(args, place);
  for (int i = 0; i < count; ++i) {
    Place next = place;
    bool next_has_low = false;
    if (i + 1 < count) {
      Advance(args, &next);
      next_has_low = HasLow<kProduct, kTokenTiles>(args, next);
    }
    Fill<kProduct>(args, ring, place, false, &turn, lane);
    if (has_low) Fill<kProduct>(args, ring, place, true, &turn, lane);
    place = next;
    has_low = next_has_low;
  }
  LetSuccessorStart();
}

// total += the warp's products of a stage. The weights of some steps stay in registers while pairs
// of token tiles pass by, each with sums of its own: the products of a group, then its two scales.
template <Product kProduct>
__device__ __forceinline__ void AddStage(const unsigned char* stage, int warp, int steps, int lane,
                                         const float (&weight_scale)[kWarpRowTiles],
                                         float (&total)[kFragments][4]) {
  // Weights in f16 take twice the registers, and their sums may be of any number of steps.
  constexpr int kTogether = kProduct == Product::kE4m3ByF16 ? 2 : kUnitSteps;
  const unsigned char* weights =
      stage + warp % kWarpsAlongRows * kWarpRowTiles * kTileUnitBytes + lane * 16;
  const unsigned char* words = stage + kUnitWeightBytes;
  const int first_tile = warp / kWarpsAlongRows * kWarpTokenTiles;
  const auto* scales =
      reinterpret_cast<const float2*>(words + UnitWordBytes(kProduct, kTokenTiles)) +
      first_tile * 4 + lane % 4;
#pragma unroll 1  // Unrolled, it spills.
  for (int begin = 0; begin < steps; begin += kTogether) {
    WeightFragment<kProduct> weight[kTogether][kWarpRowTiles];
#pragma unroll
    for (int s = 0; s < kTogether; ++s) {
      if (begin + s >= steps) break;
#pragma unroll
      for (int r = 0; r < kWarpRowTiles; ++r) {
        weight[s][r].Load(weights + r * kTileUnitBytes + (begin + s) * kTileCodeBytes);
      }
    }
#pragma unroll
    for (int tile = 0; tile < kWarpTokenTiles; tile += 2) {
      float acc[kWarpRowTiles][2][4] = {};
#pragma unroll
      for (int s = 0; s < kTogether; ++s) {
        if (begin + s >= steps) break;
        TokenFragment<kProduct, kTokenTiles, 2> tokens;
        tokens.Load(words, begin + s, first_tile + tile, lane);
#pragma unroll
        for (int r = 0; r < kWarpRowTiles; ++r) {
          MultiplyStep(acc[r][0], weight[s][r], tokens.b[0]);
          MultiplyStep(acc[r][1], weight[s][r], tokens.b[1]);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float2 scale = make_float2(1.0f, 1.0f);
        if constexpr (HasScales(kProduct)) scale = scales[(tile + half) * 4];
#pragma unroll
        for (int r = 0; r < kWarpRowTiles; ++r) {
          const float even = scale.x * weight_scale[r];  // Powers of two: exact.
          const float odd = scale.y * weight_scale[r];
          float(&sum)[4] = total[r * kWarpTokenTiles + tile + half];
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            sum[c] = fmaf(acc[r][half][c], c % 2 == 0 ? even : odd, sum[c]);
          }
        }
      }
    }
  }
}

template <Product kProduct>
__device__ void FinishRow(const StreamArgs& args, const Place& place, int warp, int lane,
                          float (&total)[kFragments][4]) {
  const int64_t row_begin = int64_t{place.row} * args.row_units;
  const int first = OwnerOf(args, row_begin);
  const int last = OwnerOf(args, row_begin + args.row_units - 1);
  if (first == last || JoinParts(args, place.row, first, last, warp, lane, total)) {
    const int token =
        (place.token_block * kTokenTiles + warp / kWarpsAlongRows * kWarpTokenTiles) * 8;
#pragma unroll
    for (int r = 0; r < kWarpRowTiles; ++r) {
      const int tile = place.block * kUnitRowTiles + warp % kWarpsAlongRows * kWarpRowTiles + r;
      WriteFragments<kWarpTokenTiles>(args, args.tasks[place.task],
                                      tile * static_cast<int>(kPanelRows), token, lane,
                                      total + r * kWarpTokenTiles);
    }
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int c = 0; c < 4; ++c) total[f][c] = 0.0f;
  }
}

template <Product kProduct>
__device__ void Consume(const StreamArgs& args, const Ring& ring, int begin, int count, int warp,
                        int lane) {
  float total[kFragments][4] = {};
  Turn<kStages<kProduct>> turn;
  Place place = PlaceOf(args, begin);
  WaitForPredecessor();
  for (int i = 0; i < count; ++i) {
    float weight_scale[kWarpRowTiles];  // From L1, nearly always: 32 units of a row lie together.
#pragma unroll
    for (int r = 0; r < kWarpRowTiles; ++r) {
      const int tile = warp % kWarpsAlongRows * kWarpRowTiles + r;
      weight_scale[r] = Ue8m0Value(ScaleCodeAt<kProduct>(args, place, tile));
    }
    bool has_more = true;
    for (bool is_low = false; has_more; is_low = true) {
      const unsigned char* stage = ring.stages + turn.stage() * kStageBytes<kProduct>;
      BarrierWait(ring.full + turn.stage(), turn.parity());
      AddStage<kProduct>(stage, warp, StepsOf(args, place), lane, weight_scale, total);
      has_more = false;
      if constexpr (HasLowParts(kProduct)) {
        const unsigned char* flag = stage + kUnitWeightBytes + UnitFlagByte(kProduct, kTokenTiles);
        has_more = !is_low && *reinterpret_cast<const unsigned*>(flag) != 0;
      }
      __syncwarp();
      if (lane == 0) BarrierArrive(ring.empty + turn.stage());
      ++turn.index;
    }
    if (place.unit + 1 == args.row_units || i + 1 == count) {
      FinishRow<kProduct>(args, place, warp, lane, total);
    }
    if (i + 1 < count) Advance(args, &place);
  }
}

// Grid: at most one block a multiprocessor, and a unit for each. Block: kThreads, of which a group
// of four warps gives its registers to those that multiply. Shared memory: kStages stages.
template <Product kProduct>
__global__ __launch_bounds__(kThreads,
                             1) void LinearTiles(const __grid_constant__ StreamArgs args) {
  __shared__ Mbarrier full[kStages<kProduct>];
  __shared__ Mbarrier empty[kStages<kProduct>];
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const Ring ring = MakeRing(full, empty);
  const int begin = ShareBegin(args, blockIdx.x);
  const int count = ShareBegin(args, int64_t{blockIdx.x} + 1) - begin;
  if (warp >= kLinearWarps) {
    LowerRegisters<40>();
    if (warp == kLinearWarps) Produce<kProduct>(args, ring, begin, count, lane);
  } else {
    RaiseRegisters<232>();
    Consume<kProduct>(args, ring, begin, count, warp, lane);
  }
}

template <Product kProduct>
absl::Status LaunchTiles(const StreamArgs& args, int blocks, const Exec& exec) {
  return Launch("LinearTiles",
                {.grid = dim3(static_cast<unsigned>(blocks)),
                 .block = dim3(kThreads),
                 .shared_bytes = static_cast<size_t>(kStages<kProduct>) * kStageBytes<kProduct>,
                 .overlaps_predecessor = true},
                exec, LinearTiles<kProduct>, args);
}

// Runs `launch` over `count` tokens at a time.
absl::Status LaunchInParts(std::span<const LinearArgs> linears, int64_t count,
                           absl::Status (*launch)(std::span<const LinearArgs>, const Exec&),
                           const Exec& exec) {
  const int64_t tokens = linears[0].x.rows;
  for (int64_t t = 0; t < tokens; t += count) {
    std::array<LinearArgs, kMaxLinearsTogether> some;
    for (size_t i = 0; i < linears.size(); ++i) {
      some[i] = linears[i];
      some[i].x = linears[i].x.Rows(t, std::min(count, tokens - t));
      some[i].out = linears[i].out.Rows(t, std::min(count, tokens - t));
    }
    ISTHMUS_RETURN_IF_ERROR(launch({some.data(), linears.size()}, exec));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LaunchLinearManyTilesLarge(std::span<const LinearArgs> linears, const Exec& exec) {
  if (linears[0].x.rows == 0) return absl::OkStatus();
  if (exec.counters == nullptr || exec.workspace == nullptr) {
    return absl::FailedPreconditionError("linear: a GPU needs exec.counters and exec.workspace");
  }
  // A row's bits must be those that it has alone: as linear.swap_ab computes them.
  if (exec.batch_invariant) {
    return LaunchInParts(linears, kSwapAbTokens, LaunchLinearManySwapAb, exec);
  }
  const Product product = ProductOf(linears[0]);
  StreamPlan plan = PlanStream(linears, kTokenTiles, exec);
  const StreamArgs& stream = plan.stream;
  const int64_t block_bytes =
      int64_t{plan.inputs} * stream.row_units * UnitBytes(product, kTokenTiles);
  const int64_t most_blocks = std::max<int64_t>(1, kMaxPackedBytes / block_bytes);
  if (stream.token_blocks > most_blocks) {
    return LaunchInParts(linears, most_blocks * 8 * kTokenTiles, LaunchLinearManyTilesLarge, exec);
  }
  const int blocks = std::min(exec.num_sms, stream.num_units);
  Workspace::Scope scope(exec.workspace);
  plan.pack.units = scope.Take<uint8_t>(block_bytes * stream.token_blocks);
  plan.stream.units = plan.pack.units;
  plan.stream.partials =
      scope.Take<float>(int64_t{blocks} * 2 * kLinearWarps * kFragments * 4 * kWarpLanes);
  ISTHMUS_RETURN_IF_ERROR(LaunchPack(plan, product, exec));
  switch (product) {
    case Product::kE4m3:
      return LaunchTiles<Product::kE4m3>(stream, blocks, exec);
    case Product::kE4m3ByF16:
      return LaunchTiles<Product::kE4m3ByF16>(stream, blocks, exec);
    default:
      return LaunchTiles<Product::kBf16>(stream, blocks, exec);
  }
}

absl::Status LaunchLinearTilesLarge(const LinearArgs& args, const Exec& exec) {
  return LaunchLinearManyTilesLarge({&args, 1}, exec);
}

}  // namespace isthmus::kernels
