// SPDX-License-Identifier: Apache-2.0
// Times of the compressor in reference arithmetic: rows x dim x ratio x index key, on one thread.
// Bound by memory and exp: two exponentials' worth of work per row and channel.
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/compressor/compressor.h"
#include "kernels/compressor/compressor_sequence.h"
#include "kernels/core/workspace.h"

namespace isthmus::kernels {
namespace {

void BM_Compressor(benchmark::State& state) {
  const int64_t rows = state.range(0);
  testing::CompressorShape shape;
  shape.dim = static_cast<int>(state.range(1));
  shape.ratio = static_cast<int>(state.range(2));
  shape.is_index_key = state.range(3) != 0;
  shape.arithmetic = Arithmetic::kReference;
  testing::CompressorSequence sequence(shape, rows, 1);
  const CompressorArgs args = sequence.Args(0, rows, nullptr);
  Workspace workspace;
  const Exec exec = {.workspace = &workspace};
  for (auto _ : state) {
    // g grows by ape every time, which changes no cost.
    if (!Compressor(args, exec).ok()) state.SkipWithError("refused");
  }
  state.SetItemsProcessed(state.iterations() * rows);
}
BENCHMARK(BM_Compressor)
    ->Unit(benchmark::kMicrosecond)
    ->Args({512, 512, 4, 0})
    ->Args({512, 512, 128, 0})
    ->Args({512, 128, 4, 1})
    ->Args({4, 512, 4, 0});

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
