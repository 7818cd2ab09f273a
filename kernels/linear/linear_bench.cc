// SPDX-License-Identifier: Apache-2.0
// Linear timed at shapes of the bundled model and of the real one: microseconds, GFLOP/s, and GB/s
// of weights.  linear_bench --benchmark_filter=...
#include <cstdint>

#include "benchmark/benchmark.h"
#include "kernels/core/workspace.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"

namespace isthmus::kernels {
namespace {

int64_t StoredBytes(const WeightView& w) {
  switch (w.format) {
    case WeightFormat::kF32:
      return w.rows * w.cols * 4;
    case WeightFormat::kBf16:
      return w.rows * w.cols * 2;
    case WeightFormat::kFp8Block128:
      return w.rows * w.cols;
    default:
      return w.rows * w.cols / 2 + w.rows * (w.cols / ScaleGroup(w.format));
  }
}

// Arguments: tokens, K, N, threads. `target` 0: the best SIMD target of this processor.
void LinearBench(benchmark::State& state, WeightFormat format, int64_t target) {
  testing::ForceTarget(target);
  const int64_t tokens = state.range(0);
  const int64_t cols = state.range(1);
  const int64_t rows = state.range(2);
  const testing::OwnedWeight stored = testing::RandomWeight(1, format, rows, cols);
  const testing::OwnedWeight weight = testing::Packed(stored.view);
  std::vector<float> x = testing::NormalValues(2, tokens * cols);
  std::vector<float> out(static_cast<size_t>(tokens * rows));
  ThreadPool threads(static_cast<int>(state.range(3)));
  Workspace workspace;
  Exec exec;
  exec.threads = &threads;
  exec.workspace = &workspace;
  const LinearArgs args = {.x = F32Matrix(x.data(), tokens, cols),
                           .weight = weight.view,
                           .out = F32Matrix(out.data(), tokens, rows),
                           .quantise_input = QuantisesInput(format),
                           .round_output = true};
  for (auto _ : state) {
    if (!Linear(args, exec).ok()) state.SkipWithError("linear failed");
    benchmark::DoNotOptimize(out.data());
  }
  testing::ForceTarget(0);
  const double calls = static_cast<double>(state.iterations());
  state.counters["GFLOP/s"] = benchmark::Counter(
      calls * 2e-9 * static_cast<double>(tokens * cols * rows), benchmark::Counter::kIsRate);
  state.counters["weight GB/s"] = benchmark::Counter(
      calls * 1e-9 * static_cast<double>(StoredBytes(weight.view)), benchmark::Counter::kIsRate);
}

void Shapes(benchmark::internal::Benchmark* b) {
  b->Unit(benchmark::kMicrosecond)->UseRealTime();
  b->Args({1, 256, 4096, 1});
  b->Args({1, 256, 4096, 2});
  b->Args({2, 256, 4096, 1});
  b->Args({4, 256, 4096, 1});
  b->Args({8, 256, 4096, 1});
  b->Args({512, 256, 1024, 1});
  b->Args({512, 256, 1024, 2});
  b->Args({512, 2048, 256, 1});
  b->Args({1, 4096, 2048, 1});
}

BENCHMARK_CAPTURE(LinearBench, f32, WeightFormat::kF32, 0)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, bf16, WeightFormat::kBf16, 0)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, fp8, WeightFormat::kFp8Block128, 0)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, mxfp4, WeightFormat::kMxfp4, 0)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, nvfp4, WeightFormat::kNvfp4, 0)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, fp8_avx2, WeightFormat::kFp8Block128, HWY_AVX2)->Apply(Shapes);
BENCHMARK_CAPTURE(LinearBench, mxfp4_avx2, WeightFormat::kMxfp4, HWY_AVX2)->Apply(Shapes);

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
