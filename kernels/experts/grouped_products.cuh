// SPDX-License-Identifier: Apache-2.0
// The two products of experts.grouped_w4a8: h = gate(w1 x, w3 x) and y = w2 h, for the rows of all
// experts in one launch each.
//
// Bound by memory: the floor is the tiles of the experts that have rows, once. So every warp keeps
// a ring of bulk copies running, across units of work, and the rest hides behind it. A unit is some
// rows of tiles of one expert times a block of its rows (of tokens). Few tokens: the warps of a
// block split a unit's inputs and add through shared memory. Many, or w2: each warp has units of
// its own (kAlone) and waits for nobody. Both add the same parts in the same order, so that a row's
// bits do not depend on the batch. mma.sync with weights on M: fp4 codes become e4m3 or f16 by
// shifts and masks, their scales are applied to the product of each k32 step, the rows' scales to
// groups of 128. Rows are loaded once for w1 and w3, a group ahead where registers allow it.
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; m matrix; nb block of eight rows.
#pragma once

#include <type_traits>

#include "kernels/core/formats.h"
#include "kernels/core/math.h"
#include "kernels/experts/grouped_operands.cuh"
#include "kernels/experts/grouped_stream.cuh"

namespace isthmus::kernels::grouped {

// Adds up the parts of the inputs of a warp that has all, in the order in which StoreUnit adds
// those of several warps. The sums wait in shared memory, a lane's own: registers are scarce.
template <ProductKind kKind, int kRingBlocks, int kBlocks>
class PartSums {
 public:
  using Totals = float[kMatrices<kKind>][kBlocks][4];
  __device__ __forceinline__ PartSums(int groups, Totals& totals) : groups_(groups) {
    Visit(totals, [](float& sum, float&) { sum = 0.0f; });
    Next(0);
  }
  // After `group`.
  __device__ __forceinline__ void Add(int group, Totals& totals) {
    if (group + 1 != part_end_) return;
    Visit(totals, [](float& sum, float& total) {
      sum += total;
      total = 0.0f;
    });
    Next(group + 1);
  }

 private:
  template <typename Each>
  __device__ __forceinline__ static void Visit(Totals& totals, Each each) {
    float* sums = PartOf<kKind, kRingBlocks>(WarpIndex());
#pragma unroll
    for (int m = 0; m < kMatrices<kKind>; ++m) {
#pragma unroll
      for (int nb = 0; nb < kBlocks; ++nb) {
        for (int i = 0; i < 4; ++i) {
          each(sums[((m * kBlocks + nb) * 4 + i) * kWarpLanes], totals[m][nb][i]);
        }
      }
    }
  }
  // The first end of a part beyond `group`.
  __device__ __forceinline__ void Next(int group) {
    do {
      ++part_;
      part_end_ = groups_ * part_ / kParts<kKind>;
    } while (part_end_ <= group && part_ < kParts<kKind>);
  }
  int groups_;
  int part_ = 0;
  int part_end_ = 0;
};

// Of a warp that has one part.
struct NoParts {
  template <typename Totals>
  __device__ __forceinline__ NoParts(int, Totals&) {}
  template <typename Totals>
  __device__ __forceinline__ void Add(int, Totals&) {}
};

// This warp's part of a unit: totals[m][nb] of its 16 outputs and its share of the inputs.
template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, bool kAlone, int kRingBlocks,
          int kBlocks>
__device__ __forceinline__ void MultiplyUnit(WeightStream<kKind, kAlone, kRingBlocks>& stream,
                                             const Job& job, int row_tile,
                                             const PlacesOf<kFormat, kMma, kBlocks>& rows,
                                             float (&totals)[kMatrices<kKind>][kBlocks][4]) {
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  constexpr int kGroupBytes = kFormat == WeightFormat::kMxfp4 ? 2 * 544 : 2 * 576;
  // Where registers allow it.
  constexpr bool kAhead = kBlocks == 1 && (kFormat == WeightFormat::kMxfp4 ||
                                           (!kIsFp8 && (kAlone || kRingBlocks == 1)));
  using GroupOperands = OperandsOf<kFormat, kMma, kKind, kBlocks>;
  const int last = stream.last();
  int group = stream.first();
  if (group == last) return;
  constexpr bool kAddsParts = kAlone && kParts<kKind> != 1;
  std::conditional_t<kAddsParts, PartSums<kKind, kRingBlocks, kBlocks>, NoParts> parts(last,
                                                                                       totals);
  GroupOperands even;
  if constexpr (kAhead) even.Load(rows, job, row_tile, group);
#pragma unroll 1
  do {
    const unsigned char* stages[kMatrices<kKind>];
    if constexpr (kAhead) {
      GroupOperands odd;
      odd.Load(rows, job, row_tile, group + 1 < last ? group + 1 : group);
      stream.Wait(stages);
      MultiplyGroup<kFormat, kMma, kKind>(stages, 0, even, rows, group, totals);
      parts.Add(group, totals);
      even.Load(rows, job, row_tile, group + 2 < last ? group + 2 : group);
      if (++group < last) {
        MultiplyGroup<kFormat, kMma, kKind>(stages, kGroupBytes, odd, rows, group, totals);
        parts.Add(group, totals);
      }
      ++group;
    } else {
      stream.Wait(stages);
      // A stage of fp8 is one group.
      const int end = kIsFp8 || group + 1 == last ? group + 1 : group + 2;
#pragma unroll 1
      for (int offset = 0; group < end; ++group, offset += kGroupBytes) {
        even.Load(rows, job, row_tile, group);
        MultiplyGroup<kFormat, kMma, kKind>(stages, offset, even, rows, group, totals);
        parts.Add(group, totals);
      }
    }
    stream.Release();
  } while (group < last);
}

// silu(min(g, limit)) * clamp(u, -limit, limit) * weight of values on the bf16 grid, on it.
__device__ __forceinline__ float Gated(float g, float u, float limit, float weight) {
  if (limit > 0.0f) {  // Written so that a NaN stays one.
    g = g > limit ? limit : g;
    u = u > limit ? limit : u;
    u = u < -limit ? -limit : u;
  }
  return RoundBf16(g * Sigmoid(g) * u * weight);
}

// Where a warp is, in shared memory: it takes no registers from the products.
struct UnitPlace {
  int job, row, block;
  int units_left;
};
template <int kOutputs>
__device__ __forceinline__ UnitOutput OutputAt(const ProductArgs& args, const UnitPlace& place) {
  const Job& job = args.scratch.jobs[place.job];
  const int first = place.block * args.block_rows;
  const int rest = job.num_rows - first;
  return {job.first_row + first, rest < args.block_rows ? rest : args.block_rows,
          place.row * kOutputs};
}

// What becomes of output n of row `row` of the unit.
template <MmaKind kMma, ProductKind kKind>
__device__ __forceinline__ void StoreSum(const ProductArgs& args, const Job& job,
                                         const UnitOutput& unit, int row, int n,
                                         const float (&sum)[kMatrices<kKind>]) {
  const int64_t at = unit.first + row;
  if constexpr (kKind == ProductKind::kGate) {
    const float of_row = RowFactor<kMma, kKind>(args, job.w1, at);
    const float g = RoundBf16(sum[0] * (FactorOf<kMma>(job.w1) * of_row));
    const float u = RoundBf16(sum[1] * (FactorOf<kMma>(job.w3) * of_row));
    const float weight = args.scratch.row_weight[at];
    args.scratch.h[at * args.outputs + n] = Bf16Bits(Gated(g, u, job.limit, weight));
  } else {
    const float factor = FactorOf<kMma>(job.w2) * RowFactor<kMma, kKind>(args, job.w2, at);
    args.scratch.y[at * args.outputs + n] = Bf16Bits(sum[0] * factor);
  }
}

// The warps' parts, added in their order. By the whole block.
template <MmaKind kMma, ProductKind kKind, int kBlocks>
__device__ __forceinline__ void StoreUnit(const ProductArgs& args, const Job& job,
                                          const UnitOutput& unit, const float* parts) {
  constexpr int kSplit = kSplits<kKind, false>;
  constexpr int kM = kMatrices<kKind>;
  const int blocks = (unit.count + 7) / 8;
  const int values = kRowTiles<kKind, false> * blocks * 128;
#pragma unroll 1  // The ring's state lives on through here.
  for (int v = static_cast<int>(threadIdx.x); v < values; v += kThreads) {
    const int lane = v % kWarpLanes;
    const int i = v / kWarpLanes % 4;
    const int nb = v / 128 % blocks;
    const int tile = v / 128 / blocks;
    const int row = nb * 8 + 2 * (lane % 4) + i % 2;
    if (row >= unit.count) continue;
    float sum[kM];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      sum[m] = 0.0f;
#pragma unroll
      for (int s = 0; s < kSplit; ++s) {
        const int warp = tile * kSplit + s;
        sum[m] += parts[((warp * kM + m) * kBlocks + nb) * 128 + i * kWarpLanes + lane];
      }
    }
    const int n = unit.first_output + tile * 16 + lane / 4 + (i >= 2 ? 8 : 0);
    StoreSum<kMma, kKind>(args, job, unit, row, n, sum);
  }
}

// The sums of a warp that had all inputs, which lie where PartSums left them.
template <MmaKind kMma, ProductKind kKind, int kRingBlocks, int kBlocks>
__device__ __forceinline__ void StoreAlone(const ProductArgs& args, const Job& job,
                                           const UnitOutput& unit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const float* sums = PartOf<kKind, kRingBlocks>(WarpIndex());
#pragma unroll 1
  for (int v = 0; v < kBlocks * 4; ++v) {
    const int row = v / 4 * 8 + 2 * (lane % 4) + v % 2;
    if (row >= unit.count) continue;
    float sum[kMatrices<kKind>];
    for (int m = 0; m < kMatrices<kKind>; ++m) sum[m] = sums[(m * kBlocks * 4 + v) * kWarpLanes];
    const int n = unit.first_output + lane / 4 + (v % 4 >= 2 ? 8 : 0);
    StoreSum<kMma, kKind>(args, job, unit, row, n, sum);
  }
}

// Those of the down product, which are in one part.
template <MmaKind kMma, int kBlocks>
__device__ __forceinline__ void StoreTotals(const ProductArgs& args, const Job& job,
                                            const UnitOutput& unit,
                                            const float (&totals)[kBlocks][4]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const float of_matrix = FactorOf<kMma>(job.w2);
  uint16_t* y = args.scratch.y + int64_t{unit.first} * args.outputs + unit.first_output + lane / 4;
#pragma unroll
  for (int v = 0; v < kBlocks * 2; ++v) {
    const int row = v / 2 * 8 + 2 * (lane % 4) + v % 2;
    if (row >= unit.count) continue;
    const float factor =
        of_matrix * RowFactor<kMma, ProductKind::kDown>(args, job.w2, unit.first + row);
    uint16_t* at = y + int64_t{row} * args.outputs;
    at[0] = Bf16Bits(totals[v / 2][v % 2] * factor);
    at[8] = Bf16Bits(totals[v / 2][v % 2 + 2] * factor);
  }
}

// One unit, by the whole block or by a warp: multiply, add, store.
template <MmaKind kMma, ProductKind kKind, bool kAlone, int kRingBlocks, int kBlocks>
__device__ __forceinline__ void RunUnit(const ProductArgs& args,
                                        WeightStream<kKind, kAlone, kRingBlocks>& stream,
                                        const UnitPlace* place) {
  constexpr int kM = kMatrices<kKind>;
  constexpr int kOutputs = kRowTiles<kKind, kAlone> * 16;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  float totals[kM][kBlocks][4] = {};
  {
    const Job& job = args.scratch.jobs[place->job];
    const UnitOutput unit = OutputAt<kOutputs>(args, *place);
    const int row_tile = unit.first_output / 16 + (kAlone ? 0 : warp / kSplits<kKind, kAlone>);
    const WeightFormat format = kKind == ProductKind::kGate ? job.w1.format : job.w2.format;
    if constexpr (kMma == MmaKind::kFp4Rows) {
      if (format == WeightFormat::kFp8Block128) {
        const RowPlaces<kBlocks> rows = PlaceRows<kKind, kBlocks>(args, unit);
        MultiplyUnit<WeightFormat::kFp8Block128, kMma>(stream, job, row_tile, rows, totals);
      } else {
        const Fp4Places<kBlocks> rows = PlaceFp4Rows<kKind, kBlocks>(args, unit);
        if (format == WeightFormat::kMxfp4) {
          MultiplyUnit<WeightFormat::kMxfp4, kMma>(stream, job, row_tile, rows, totals);
        } else {
          MultiplyUnit<WeightFormat::kNvfp4, kMma>(stream, job, row_tile, rows, totals);
        }
      }
    } else {
      const RowPlaces<kBlocks> rows = PlaceRows<kKind, kBlocks>(args, unit);
      if (format == WeightFormat::kMxfp4) {
        MultiplyUnit<WeightFormat::kMxfp4, kMma>(stream, job, row_tile, rows, totals);
      } else if (format == WeightFormat::kNvfp4) {
        MultiplyUnit<WeightFormat::kNvfp4, kMma>(stream, job, row_tile, rows, totals);
      } else {
        MultiplyUnit<WeightFormat::kFp8Block128, kMma>(stream, job, row_tile, rows, totals);
      }
    }
  }
  // Read again rather than kept.
  const Job& job = args.scratch.jobs[place->job];
  const UnitOutput unit = OutputAt<kOutputs>(args, *place);
  if constexpr (kAlone && kParts<kKind> == 1) {
    StoreTotals<kMma>(args, job, unit, totals[0]);
  } else if constexpr (kAlone) {
    StoreAlone<kMma, kKind, kRingBlocks, kBlocks>(args, job, unit);
  } else {
    const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
    float* parts = PartsOf<kRingBlocks>();
    __syncthreads();  // The parts of the unit before this one have been read.
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int nb = 0; nb < kBlocks; ++nb) {
        float* mine = parts + ((warp * kM + m) * kBlocks + nb) * 128 + lane;
        for (int i = 0; i < 4; ++i) mine[i * kWarpLanes] = totals[m][nb][i];
      }
    }
    __syncthreads();
    StoreUnit<kMma, kKind, kBlocks>(args, job, unit, parts);
  }
}

__device__ __forceinline__ void NextUnit(const ProductArgs& args, int row_units, UnitPlace* place) {
  UnitPlace at = *place;
  --at.units_left;
  if (++at.block * args.block_rows >= args.scratch.jobs[at.job].num_rows) {
    at.block = 0;
    if (++at.row == row_units) {
      at.row = 0;
      ++at.job;
    }
  }
  *place = at;
}

// Grid: a multiple of the multiprocessors. Block: kThreads. Shared memory: kProductSharedBytes.
// Units have at most 8 kBlocks rows.
template <MmaKind kMma, ProductKind kKind, bool kAlone, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocksPerSm<kBlocks>) void MultiplyExperts(
    const __grid_constant__ ProductArgs args) {
#if !ISTHMUS_HAS_SM120A
  if constexpr (kMma != MmaKind::kF16) __trap();
#elif !ISTHMUS_HAS_SM90A
  if constexpr (kMma == MmaKind::kF16) __trap();
#endif
  if (threadIdx.x == 0) {
    constexpr int kBarriers = kWarps * kTurns<kKind, kBlocks>;
    for (int i = 0; i < kBarriers; ++i) BarrierInit(BarrierOf<kKind, kBlocks>(0, i), 1);
    FenceBarrierInit();
  }
  __syncthreads();
  // The rows of the gate's product come from its predecessor, as does the list. That of the down
  // product has been there since the gate's began, so its weights may set out early.
  if (kKind == ProductKind::kGate) {
    PrefetchShared(args);
    WaitForPredecessor();
  }
  constexpr int kOutputs = kRowTiles<kKind, kAlone> * 16;  // Of a unit.
  const int row_units = args.outputs / kOutputs;
  const int64_t shares = int64_t{gridDim.x} * (kAlone ? kWarps : 1);
  const int64_t share = kAlone ? int64_t{blockIdx.x} * kWarps + WarpIndex() : int64_t{blockIdx.x};
  const UnitRange range = ShareOf(args, row_units, share, shares);
  __shared__ NextCopy next_copies[kWarps];
  WeightStream<kKind, kAlone, kBlocks> stream(args, range, next_copies + WarpIndex());
  if (kKind == ProductKind::kDown) WaitForPredecessor();
  LetSuccessorStart();

  __shared__ UnitPlace places[kWarps];
  UnitPlace* place = places + WarpIndex();
  if (threadIdx.x % kWarpLanes == 0) {
    *place = {range.job, range.row, range.block, range.end - range.begin};
  }
  __syncwarp();
  while (place->units_left > 0) {
    constexpr int kFew = (kBlocks + 1) / 2;
    if (kBlocks == kFew || OutputAt<kOutputs>(args, *place).count <= 8 * kFew) {
      RunUnit<kMma, kKind, kAlone, kBlocks, kFew>(args, stream, place);
    } else {
      RunUnit<kMma, kKind, kAlone, kBlocks, kBlocks>(args, stream, place);
    }
    __syncwarp();
    if (threadIdx.x % kWarpLanes == 0) NextUnit(args, row_units, place);
    __syncwarp();
  }
}

template <MmaKind kMma, ProductKind kKind, bool kAlone, int kBlocks>
absl::Status LaunchProductBlocks(const ProductArgs& args, const Exec& exec) {
  static_assert(kProductSharedBytes<kKind, kBlocks> +
                    kWarps * (sizeof(NextCopy) + sizeof(UnitPlace)) <=
                kMaxSharedBytes);
  // One block of threads fits into the shared memory of a multiprocessor of sm_120.
  const int per_sm = exec.arch >= kArchSm120 ? 1 : kBlocksPerSm<kBlocks>;
  const int sms = exec.num_sms > 0 ? exec.num_sms : 1;
  return Launch("MultiplyExperts",
                {.grid = dim3(static_cast<unsigned>(sms * per_sm)),
                 .block = dim3(kThreads),
                 .shared_bytes = kProductSharedBytes<kKind, kBlocks>,
                 .overlaps_predecessor = true},
                exec, MultiplyExperts<kMma, kKind, kAlone, kBlocks>, args);
}

// The down product has four times the outputs and a quarter of the inputs: even one token has a
// unit for most warps, and alone they need no barrier. The gate's has so from 17 tokens on.
template <MmaKind kMma, ProductKind kKind>
absl::Status LaunchProduct(const ProductArgs& args, const Exec& exec) {
  constexpr bool kIsDown = kKind == ProductKind::kDown;
  if (args.block_rows == 8) return LaunchProductBlocks<kMma, kKind, kIsDown, 1>(args, exec);
  if (args.block_rows == 32) return LaunchProductBlocks<kMma, kKind, true, 4>(args, exec);
  if (args.tokens > 16) return LaunchProductBlocks<kMma, kKind, true, 2>(args, exec);
  return LaunchProductBlocks<kMma, kKind, kIsDown, 2>(args, exec);
}

}  // namespace isthmus::kernels::grouped
