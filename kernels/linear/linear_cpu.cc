// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path, the one that serves: quantise into scratch, multiply, round as sums are
// stored.
#include <algorithm>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/core/quantise.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/linear/linear_variants.h"

namespace isthmus::kernels {
namespace {

// Rows per item of an elementwise loop: about 32 K elements, a few microseconds.
int64_t RowGrain(int64_t cols) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(cols, 1)); }

}  // namespace

void QuantiseActivationCpu(const MatrixView& x, const MatrixView& out, const Exec& exec) {
  ParallelFor(exec, x.rows, RowGrain(x.cols), [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      RoundTripFp8Row(x.f32(t), x.cols, kActivationGroup, out.f32(t));
    }
  });
}

absl::Status LaunchLinearCpu(const LinearArgs& args, const Exec& exec) {
  Workspace::Scope scope(exec.workspace);
  MatrixView x = args.x;
  if (args.quantise_input) {
    x = F32Matrix(scope.Take<float>(x.rows * x.cols), x.rows, x.cols);
    QuantiseActivationCpu(args.x, x, exec);
  }
  Gemm(x, args.weight, args.out, exec, args.round_output);
  return absl::OkStatus();
}

int64_t LinearScratchBytes(int64_t rows, int64_t inputs, bool quantises_input, int threads) {
  ScratchCount scratch;
  if (quantises_input) scratch.Take<float>(rows * inputs);
  const GemmInput x = {rows, inputs};
  scratch.Lend(GemmScratchBytes({&x, 1}, threads));
  return scratch.peak_bytes();
}

}  // namespace isthmus::kernels
