// SPDX-License-Identifier: Apache-2.0
// The two products of experts.grouped_w4a8: h = gate(w1 x, w3 x) and y = w2 h, for the rows of all
// experts in one launch each.
//
// Bound by memory: the floor is the tiles of the experts that have rows, once. So every warp keeps
// a ring of bulk copies running, across units of work, and the rest hides behind it. A unit is some
// rows of tiles of one expert times a block of its rows (of tokens). The warps of a block split a
// unit's inputs, always alike, so that a row's bits do not depend on the batch; they add through
// shared memory. mma.sync m16n8k32 with weights on M: fp4 codes become e4m3 by shifts and masks,
// their scales are applied to the product of each k32 step, the rows' scales to groups of 128.
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; m matrix; nb block of eight rows.
#pragma once

#include <type_traits>

#include "kernels/core/formats.h"
#include "kernels/core/math.h"
#include "kernels/experts/grouped_fragments.cuh"
#include "kernels/experts/grouped_stream.cuh"

namespace isthmus::kernels::grouped {

// totals[nb] += sums[nb] times the scales of the rows and of the group's weights.
template <int kBlocks>
__device__ __forceinline__ void AddScaled(const float (&sums)[kBlocks][4],
                                          const RowPlaces<kBlocks>& rows, int group,
                                          float weight_scale, float (&totals)[kBlocks][4]) {
  const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
  for (int nb = 0; nb < kBlocks; ++nb) {
    const float mine = rows.Scale(nb, group);
    for (int i = 0; i < 2; ++i) {
      const float scale = __shfl_sync(kFullWarp, mine, 8 * t + 4 * i) * weight_scale;
      totals[nb][i] = fmaf(sums[nb][i], scale, totals[nb][i]);
      totals[nb][i + 2] = fmaf(sums[nb][i + 2], scale, totals[nb][i + 2]);
    }
  }
}

// This warp's part of a unit: totals[m][nb] of its 16 outputs and its share of the inputs.
template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, int kRingBlocks, int kBlocks>
__device__ __forceinline__ void MultiplyUnit(WeightStream<kKind, kRingBlocks>& stream,
                                             const Job& job, int row_tile,
                                             const RowPlaces<kBlocks>& rows,
                                             float (&totals)[kMatrices<kKind>][kBlocks][4]) {
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  constexpr int kStageGroups = kIsFp8 ? 1 : 2;
  constexpr int kGroupBytes = kIsFp8                            ? 4 * 512
                              : kFormat == WeightFormat::kMxfp4 ? 2 * 544
                                                                : 2 * 576;
  // Scales for every 16 inputs are not among those of mxf8f6f4.
  constexpr bool kIsScaled = kMma == MmaKind::kBlockScaled && kFormat != WeightFormat::kNvfp4;
#pragma unroll 1
  for (int first = stream.first(); first < stream.last(); first += kStageGroups) {
#pragma unroll
    for (int m = 0; m < kMatrices<kKind>; ++m) {
      const JobWeight& w = kKind == ProductKind::kDown ? job.w2 : m == 0 ? job.w1 : job.w3;
      const unsigned char* stage = nullptr;
#pragma unroll 1
      for (int group = first; group < first + kStageGroups && group < stream.last(); ++group) {
        std::conditional_t<kMma == MmaKind::kF16, HalfRows<kBlocks>, GroupRows<kBlocks>> codes;
        uint32_t weight_scale = 127;  // ue8m0 of 1.
        if constexpr (kIsFp8) {
          const int at = (w.first_row + row_tile * 16) / 128 * w.scale_columns + group;
          weight_scale = w.scales[at];
        }
        codes.LoadAhead(rows, group);
        float scales[kBlocks];  // Of row g of every block.
        if constexpr (kIsScaled) {
          for (int nb = 0; nb < kBlocks; ++nb) scales[nb] = rows.Scale(nb, group);
        }
        if (stage == nullptr) stage = stream.Wait();
        const unsigned char* tiles = stage + (group - first) * kGroupBytes;
        if constexpr (kIsScaled) {
          MultiplyScaledGroup<kFormat, kBlocks>(tiles, rows, group, codes, weight_scale, scales,
                                                totals[m]);
        } else {
          float sums[kBlocks][4] = {};
          if constexpr (kMma == MmaKind::kF16) {
            MultiplyHalfGroup<kFormat, kBlocks>(tiles, rows, group, codes, sums);
          } else if constexpr (kIsFp8) {
            MultiplyFp8Group<kBlocks>(tiles, rows, group, codes, sums);
          } else {
            MultiplyFp4Group<kFormat, kBlocks>(tiles, rows, group, codes, sums);
          }
          AddScaled<kBlocks>(sums, rows, group, Ue8m0Value(static_cast<uint8_t>(weight_scale)),
                             totals[m]);
        }
      }
      stream.Release();
    }
  }
  if constexpr (kIsScaled && kFormat == WeightFormat::kMxfp4) {
    // The factor of a job is that of codes read as e4m3.
#pragma unroll
    for (int m = 0; m < kMatrices<kKind>; ++m) {
      for (int nb = 0; nb < kBlocks; ++nb) {
        for (int i = 0; i < 4; ++i) totals[m][nb][i] *= 0x1p-6f;
      }
    }
  }
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

// Where a unit lies: rows [first, first + count) of the batch, outputs from first_output on.
struct UnitOutput {
  int first, count;
  int first_output;
};

// The warps' parts, added in their order, and what becomes of the sums. By the whole block.
template <ProductKind kKind, int kBlocks>
__device__ __forceinline__ void StoreUnit(const ProductArgs& args, const Job& job,
                                          const UnitOutput& unit, const float* parts) {
  constexpr int kSplit = kSplits<kKind>;
  constexpr int kM = kMatrices<kKind>;
  const int blocks = (unit.count + 7) / 8;
  const int values = kRowTiles<kKind> * blocks * 128;
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
    const int64_t at = unit.first + row;
    const int n = unit.first_output + tile * 16 + lane / 4 + (i >= 2 ? 8 : 0);
    if constexpr (kKind == ProductKind::kGate) {
      const float g = RoundBf16(sum[0] * job.w1.factor);
      const float u = RoundBf16(sum[kM - 1] * job.w3.factor);
      const float weight = args.scratch.row_weight[at];
      args.scratch.h[at * args.outputs + n] = Bf16Bits(Gated(g, u, job.limit, weight));
    } else {
      args.scratch.y[at * args.outputs + n] = Bf16Bits(sum[0] * job.w2.factor);
    }
  }
}

template <ProductKind kKind, int kBlocks>
__device__ __forceinline__ RowPlaces<kBlocks> PlaceRows(const ProductArgs& args,
                                                        const UnitOutput& unit) {
  constexpr bool kIsGate = kKind == ProductKind::kGate;
  const uint8_t* codes = kIsGate ? args.scratch.x_codes : args.scratch.h_codes;
  const float* scales = kIsGate ? args.scratch.x_scales : args.scratch.h_scales;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  RowPlaces<kBlocks> places;
  places.codes = codes;
  places.scales = scales;
#pragma unroll
  for (int nb = 0; nb < kBlocks; ++nb) {
    const int in_unit = nb * 8 + lane / 4;
    int row = unit.first + (in_unit < unit.count ? in_unit : unit.count - 1);
    if (kIsGate) row = args.scratch.row_token[row];
    places.first_code[nb] = static_cast<uint32_t>(row * args.inputs + 16 * (lane % 4));
  }
  return places;
}

// One unit by the whole block: multiply, add, store.
template <MmaKind kMma, ProductKind kKind, int kRingBlocks, int kBlocks>
__device__ __forceinline__ void RunUnit(const ProductArgs& args,
                                        WeightStream<kKind, kRingBlocks>& stream, const Job& job,
                                        const UnitOutput& unit) {
  float* parts = PartsOf<kRingBlocks>();
  constexpr int kM = kMatrices<kKind>;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int row_tile = unit.first_output / 16 + warp / kSplits<kKind>;
  const RowPlaces<kBlocks> rows = PlaceRows<kKind, kBlocks>(args, unit);
  float totals[kM][kBlocks][4] = {};
  const WeightFormat format = kKind == ProductKind::kGate ? job.w1.format : job.w2.format;
  if (format == WeightFormat::kMxfp4) {
    MultiplyUnit<WeightFormat::kMxfp4, kMma, kKind>(stream, job, row_tile, rows, totals);
  } else if (format == WeightFormat::kNvfp4) {
    MultiplyUnit<WeightFormat::kNvfp4, kMma, kKind>(stream, job, row_tile, rows, totals);
  } else {
    MultiplyUnit<WeightFormat::kFp8Block128, kMma, kKind>(stream, job, row_tile, rows, totals);
  }
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
  StoreUnit<kKind, kBlocks>(args, job, unit, parts);
}

// Grid: a multiple of the multiprocessors. Block: kThreads. Shared memory: kProductSharedBytes.
// Units have at most 8 kBlocks rows.
template <MmaKind kMma, ProductKind kKind, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocksPerSm<kBlocks>) void MultiplyExperts(
    const __grid_constant__ ProductArgs args) {
#if !ISTHMUS_HAS_SM120A
  if constexpr (kMma != MmaKind::kF16) __trap();
#elif !ISTHMUS_HAS_SM90A
  if constexpr (kMma == MmaKind::kF16) __trap();
#endif
  constexpr int kDepth = kStages<kBlocks>;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kWarps * kDepth; ++i) BarrierInit(BarrierOf<kKind, kBlocks>(0, i), 1);
    FenceBarrierInit();
  }
  __syncthreads();
  // The rows of the gate's product come from its predecessor, as does the list. That of the down
  // product has been there since the gate's began, so its weights may set out early.
  if (kKind == ProductKind::kGate) {
    PrefetchShared(args);
    WaitForPredecessor();
  }
  const int row_units = args.outputs / (kRowTiles<kKind> * 16);
  const UnitRange range = ShareOf(args, row_units);
  WeightStream<kKind, kBlocks> stream(args, range);
  for (int i = 0; i < kDepth; ++i) stream.Issue();
  if (kKind == ProductKind::kDown) WaitForPredecessor();
  LetSuccessorStart();

  int job_index = range.job;
  int row = range.row;
  int block = range.block;
  for (int left = range.end - range.begin; left > 0; --left) {
    const Job& job = args.scratch.jobs[job_index];
    const int first = block * args.block_rows;
    const int rest = job.num_rows - first;
    const UnitOutput at = {job.first_row + first, rest < args.block_rows ? rest : args.block_rows,
                           row * kRowTiles<kKind> * 16};
    constexpr int kFew = (kBlocks + 1) / 2;
    if (kBlocks == kFew || at.count <= 8 * kFew) {
      RunUnit<kMma, kKind, kBlocks, kFew>(args, stream, job, at);
    } else {
      RunUnit<kMma, kKind, kBlocks, kBlocks>(args, stream, job, at);
    }
    if (rest > args.block_rows) {
      ++block;
      continue;
    }
    block = 0;
    if (++row < row_units) continue;
    row = 0;
    ++job_index;
  }
}

template <MmaKind kMma, ProductKind kKind, int kBlocks>
absl::Status LaunchProductBlocks(const ProductArgs& args, const Exec& exec) {
  static_assert(kProductSharedBytes<kKind, kBlocks> <= kMaxSharedBytes);
  // One block of threads fits into the shared memory of a multiprocessor of sm_120.
  const int per_sm = exec.arch >= kArchSm120 ? 1 : kBlocksPerSm<kBlocks>;
  const int sms = exec.num_sms > 0 ? exec.num_sms : 1;
  return Launch("MultiplyExperts",
                {.grid = dim3(static_cast<unsigned>(sms * per_sm)),
                 .block = dim3(kThreads),
                 .shared_bytes = kProductSharedBytes<kKind, kBlocks>,
                 .overlaps_predecessor = true},
                exec, MultiplyExperts<kMma, kKind, kBlocks>, args);
}

template <MmaKind kMma, ProductKind kKind>
absl::Status LaunchProduct(const ProductArgs& args, const Exec& exec) {
  if (args.block_rows == 8) return LaunchProductBlocks<kMma, kKind, 1>(args, exec);
  if (args.block_rows == 16) return LaunchProductBlocks<kMma, kKind, 2>(args, exec);
  return LaunchProductBlocks<kMma, kKind, 4>(args, exec);
}

}  // namespace isthmus::kernels::grouped
