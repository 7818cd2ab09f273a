// SPDX-License-Identifier: Apache-2.0
// What the products of experts.grouped_w4a8 and its kin multiply: where the rows of a unit lie, the
// operands of one group of 128 inputs, and the group multiplied, by format and kind of product.
//
// Letters: g = lane / 4, t = lane % 4 as in mma.cuh; m matrix; nb block of eight rows.
#pragma once

#include <type_traits>

#include "kernels/experts/grouped_fp4_rows.cuh"
#include "kernels/experts/grouped_fragments.cuh"
#include "kernels/experts/grouped_stream.cuh"

namespace isthmus::kernels::grouped {

// Where a unit lies: rows [first, first + count) of the batch, outputs from first_output on.
struct UnitOutput {
  int first, count;
  int first_output;
};

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

// The same of rows that are NVFP4.
template <ProductKind kKind, int kBlocks>
__device__ __forceinline__ Fp4Places<kBlocks> PlaceFp4Rows(const ProductArgs& args,
                                                           const UnitOutput& unit) {
  constexpr bool kIsGate = kKind == ProductKind::kGate;
  const Fp4Target& from = kIsGate ? args.scratch.x_fp4 : args.scratch.h_fp4;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  Fp4Places<kBlocks> places;
  places.codes = from.codes;
  places.scales = from.scales;
#pragma unroll
  for (int nb = 0; nb < kBlocks; ++nb) {
    const int in_unit = nb * 8 + lane / 4;
    int row = unit.first + (in_unit < unit.count ? in_unit : unit.count - 1);
    if (kIsGate) row = args.scratch.row_token[row];
    places.first_code[nb] = static_cast<uint32_t>(row * args.inputs);
  }
  return places;
}

// What a group needs besides the tiles: of few rows, loaded a group ahead.
template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, int kBlocks>
struct Operands {
  std::conditional_t<kMma == MmaKind::kF16, HalfRows<kBlocks>, GroupRows<kBlocks>> codes;
  float scales[kBlocks];                     // Of row g of every block.
  uint32_t weight_scales[kMatrices<kKind>];  // Of fp8: ue8m0.

  __device__ __forceinline__ void Load(const RowPlaces<kBlocks>& rows, const Job& job, int row_tile,
                                       int group) {
    codes.LoadAhead(rows, group);
#pragma unroll
    for (int nb = 0; nb < kBlocks; ++nb) scales[nb] = rows.Scale(nb, group);
    if constexpr (kFormat == WeightFormat::kFp8Block128) {
#pragma unroll
      for (int m = 0; m < kMatrices<kKind>; ++m) {
        const JobWeight& w = kKind == ProductKind::kDown ? job.w2 : m == 0 ? job.w1 : job.w3;
        const int at = (w.first_row + row_tile * 16) / 128 * w.scale_columns + group;
        weight_scales[m] = w.scales[at];
      }
    }
  }
};

template <int kBlocks>
struct Fp4Operands {
  Fp4Rows<kBlocks> rows;

  __device__ __forceinline__ void Load(const Fp4Places<kBlocks>& places, const Job&, int,
                                       int group) {
    rows.Load(places, group);
  }
};

// By what rows meet the weights of a format.
template <WeightFormat kFormat, MmaKind kMma>
inline constexpr bool kHasFp4Rows =
    kMma == MmaKind::kFp4Rows&& kFormat != WeightFormat::kFp8Block128;
template <WeightFormat kFormat, MmaKind kMma, int kBlocks>
using PlacesOf =
    std::conditional_t<kHasFp4Rows<kFormat, kMma>, Fp4Places<kBlocks>, RowPlaces<kBlocks>>;
template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, int kBlocks>
using OperandsOf = std::conditional_t<kHasFp4Rows<kFormat, kMma>, Fp4Operands<kBlocks>,
                                      Operands<kFormat, kMma, kKind, kBlocks>>;

// totals[m][nb] += the tiles of one group of matrix m times the rows.
template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, int kBlocks>
__device__ __forceinline__ void MultiplyGroup(
    const unsigned char* const (&stages)[kMatrices<kKind>], int offset,
    Operands<kFormat, kMma, kKind, kBlocks>& operands, const RowPlaces<kBlocks>& rows, int group,
    float (&totals)[kMatrices<kKind>][kBlocks][4]) {
  constexpr int kM = kMatrices<kKind>;
  constexpr bool kIsFp8 = kFormat == WeightFormat::kFp8Block128;
  // Scales for every 16 inputs are not among those of mxf8f6f4.
  if constexpr ((kMma == MmaKind::kBlockScaled && kFormat != WeightFormat::kNvfp4) ||
                kMma == MmaKind::kFp4Rows) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      MultiplyScaledGroup<kFormat, kBlocks>(stages[m] + offset, rows, group, operands.codes,
                                            kIsFp8 ? operands.weight_scales[m] : 127u,
                                            operands.scales, totals[m]);
    }
  } else {
    const int t = static_cast<int>(threadIdx.x) % 4;
    // Of few rows shuffled once, of many where they are due: registers.
    float row_scales[2] = {};
    if constexpr (kBlocks == 1) {
      row_scales[0] = __shfl_sync(kFullWarp, operands.scales[0], 8 * t);
      row_scales[1] = __shfl_sync(kFullWarp, operands.scales[0], 8 * t + 4);
    }
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      float sums[kBlocks][4] = {};
      if constexpr (kMma == MmaKind::kF16) {
        MultiplyHalfGroup<kFormat, kBlocks>(stages[m] + offset, rows, group, operands.codes, sums);
      } else if constexpr (kIsFp8) {
        MultiplyFp8Group<kBlocks>(stages[m] + offset, rows, group, operands.codes, sums);
      } else {
        MultiplyFp4Group<kFormat, kBlocks>(stages[m] + offset, rows, group, operands.codes, sums);
      }
#pragma unroll
      for (int nb = 0; nb < kBlocks; ++nb) {
        for (int i = 0; i < 2; ++i) {
          float scale = kBlocks == 1 ? row_scales[i]
                                     : __shfl_sync(kFullWarp, operands.scales[nb], 8 * t + 4 * i);
          if constexpr (kIsFp8) {
            scale *= Ue8m0Value(static_cast<uint8_t>(operands.weight_scales[m]));
          }
          totals[m][nb][i] = fmaf(sums[nb][i], scale, totals[m][nb][i]);
          totals[m][nb][i + 2] = fmaf(sums[nb][i + 2], scale, totals[m][nb][i + 2]);
        }
      }
    }
  }
}

template <WeightFormat kFormat, MmaKind kMma, ProductKind kKind, int kBlocks>
__device__ __forceinline__ void MultiplyGroup(
    const unsigned char* const (&stages)[kMatrices<kKind>], int offset,
    Fp4Operands<kBlocks>& operands, const Fp4Places<kBlocks>&, int,
    float (&totals)[kMatrices<kKind>][kBlocks][4]) {
#pragma unroll
  for (int m = 0; m < kMatrices<kKind>; ++m) {
    MultiplyFp4RowsGroup<kFormat, kBlocks>(stages[m] + offset, operands.rows, totals[m]);
  }
}

// What sums of a matrix are multiplied with in the end. The factor of a job is that of codes read
// as e4m3, which block-scaled instructions do not do.
template <MmaKind kMma>
__device__ __forceinline__ float FactorOf(const JobWeight& w) {
  const bool is_scaled = (kMma == MmaKind::kBlockScaled && w.format == WeightFormat::kMxfp4) ||
                         (kMma == MmaKind::kFp4Rows && w.format != WeightFormat::kFp8Block128);
  return is_scaled ? w.factor * 0x1p-6f : w.factor;
}
// And that of row `row` of the batch: the scale of a row that is NVFP4.
template <MmaKind kMma, ProductKind kKind>
__device__ __forceinline__ float RowFactor(const ProductArgs& args, const JobWeight& w,
                                           int64_t row) {
  if constexpr (kMma == MmaKind::kFp4Rows) {
    if (w.format == WeightFormat::kFp8Block128) return 1.0f;
    if constexpr (kKind == ProductKind::kDown) return args.scratch.h_fp4.row_scales[row];
    return args.scratch.x_fp4.row_scales[args.scratch.row_token[row]];
  } else {
    return 1.0f;
  }
}

}  // namespace isthmus::kernels::grouped
