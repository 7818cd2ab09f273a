// SPDX-License-Identifier: Apache-2.0
// Times of the indexer in reference arithmetic: rows x heads x position of the first row x threads;
// of a selection alone; and of the index query. Scores are bound by arithmetic: one multiply-add
// per key, head and channel.
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/core/workspace.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_sequence.h"

namespace isthmus::kernels {
namespace {

void BM_Indexer(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const int64_t start = state.range(2);
  testing::IndexerShape shape;
  shape.heads = state.range(1);
  shape.topk = 512;
  shape.arithmetic = Arithmetic::kReference;
  testing::IndexerSequence sequence(shape, start + rows, 1);
  std::vector<int32_t> selected(static_cast<size_t>(rows * shape.topk));
  const IndexerArgs args = sequence.Args(start, start + rows, selected.data());
  ThreadPool pool(static_cast<int>(state.range(3)));
  Workspace workspace;
  const Exec exec = {.threads = &pool, .workspace = &workspace};
  for (auto _ : state) {
    if (!Indexer(args, exec).ok()) state.SkipWithError("refused");
  }
  const auto products = static_cast<double>(rows * shape.heads * shape.dim * (start / 4));
  state.counters["multiply_adds"] =
      benchmark::Counter(products, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Indexer)
    ->Unit(benchmark::kMillisecond)
    ->Args({512, 16, 14000, 1})
    ->Args({64, 64, 14000, 1})
    ->Args({1, 16, 14000, 1})
    ->Args({1, 64, 14000, 1});

void BM_SelectTopK(benchmark::State& state) {
  const int64_t n = state.range(0);
  const std::vector<float> scores = testing::NormalValues(1, n);
  std::vector<uint64_t> keys(static_cast<size_t>(n));
  std::vector<int32_t> selected(512);
  for (auto _ : state) SelectTopK(scores.data(), n, 512, keys.data(), selected.data());
}
BENCHMARK(BM_SelectTopK)->Unit(benchmark::kMicrosecond)->Arg(600)->Arg(3500)->Arg(32000);

void BM_IndexQuery(benchmark::State& state) {
  std::vector<float> q = testing::NormalValues(1, 512 * 64 * 128);
  const MatrixView view = F32Matrix(q.data(), 512, 64 * 128);
  for (auto _ : state) {
    if (!IndexQuery(view, 64, 128, Arithmetic::kReference, Exec{}).ok()) {
      state.SkipWithError("refused");
    }
  }
}
BENCHMARK(BM_IndexQuery)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
