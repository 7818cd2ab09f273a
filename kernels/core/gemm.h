// SPDX-License-Identifier: Apache-2.0
// The CPU matrix product behind linear, experts and the hyper-connection mix.
//
//   out[m, n] = sum_g scale[n, g] * ( sum_{k in group g, ascending} x[m, k] * w[n, k] )
//
// Groups are 128 along K (fp8, bf16, f32; those of a share that is cut inside a block end with the
// blocks of the whole), 32 (MXFP4 and its cast) or 16 (NVFP4). Vectorised over
// n; every (m, n) is summed by explicit FMAs in ascending k, then group by group (total =
// fma(group, scale, total)), so its bits depend neither on the SIMD target nor on M, the tile, the
// thread count or the layout of the weight (kernels/decisions/0001-summation-order.md).
#pragma once

#include <cstdint>
#include <span>

#include "kernels/core/exec.h"
#include "kernels/core/tensor.h"
#include "kernels/core/weight.h"

namespace isthmus::kernels {

// x: f32 [M, K], out: f32 [M, N]; rows may be strided; out must not overlap x. Shapes must agree
// (checked). `rounds`: out is rounded to the bf16 grid as it is stored.
void Gemm(const MatrixView& x, const WeightView& w, const MatrixView& out, const Exec& exec,
          bool rounds = false);

// One product of several.
struct GemmTask {
  MatrixView x;
  WeightView w;
  MatrixView out;
  bool rounds = false;
};
// Independent products in one parallel loop: the experts of a step, or several linears of one
// input. Each has the bits that Gemm gives; no output may overlap anything.
void GemmMany(std::span<const GemmTask> tasks, const Exec& exec);

// Up to here rows are multiplied where they lie, as weights decode; more are packed.
inline constexpr int64_t kFusedRows = 4;
inline constexpr int64_t kMaxTileRows = 8;  // Rows of one register tile (AVX2 uses six).

// What a product reads, for planning: x [rows, inputs], which it may share with the one before it.
struct GemmInput {
  int64_t rows = 0;
  int64_t inputs = 0;
  bool is_shared = false;
};
// Bytes of scratch that such products take in one call.
int64_t GemmScratchBytes(std::span<const GemmInput> inputs, int threads);

// The value of one weight, by the scalar codecs: what a definition sums.
double WeightValue(const WeightView& w, int64_t n, int64_t k);

}  // namespace isthmus::kernels
