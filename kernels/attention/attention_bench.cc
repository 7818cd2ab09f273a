// SPDX-License-Identifier: Apache-2.0
// Times of attention in reference arithmetic: rows x heads x position of the first row x ratio x
// threads. Bound by arithmetic: two multiply-adds per key, head and channel.
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_sequence.h"
#include "kernels/core/workspace.h"

namespace isthmus::kernels {
namespace {

void BM_Attention(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const int64_t start = state.range(2);
  const int64_t end = start + rows;
  testing::AttentionShape shape;
  shape.heads = state.range(1);
  shape.head_dim = 512;
  shape.ratio = static_cast<int>(state.range(3));
  shape.arithmetic = Arithmetic::kReference;
  testing::AttentionSequence sequence(shape, end, 1);
  for (int64_t p = std::max<int64_t>(0, start - shape.window); p < start; ++p) {
    sequence.WriteRing(p);
  }
  if (shape.ratio == 4) sequence.SelectSome(512, 2);
  std::vector<float> out(static_cast<size_t>(rows * shape.heads * shape.head_dim));
  const AttentionArgs args = sequence.Args(start, end, out.data());
  ThreadPool pool(static_cast<int>(state.range(4)));
  Workspace workspace;
  const Exec exec = {.threads = &pool, .workspace = &workspace};
  for (auto _ : state) {
    if (!Attention(args, exec).ok()) state.SkipWithError("refused");
  }
  double products = 0.0;
  for (int64_t t = start; t < end; ++t) {
    int64_t keys = std::min<int64_t>(t + 1, shape.window);
    const int64_t visible = VisibleEntries(t, shape.ratio);
    keys += shape.ratio == 4 ? std::min<int64_t>(visible, 512) : visible;
    products += 2.0 * static_cast<double>(keys * shape.heads * shape.head_dim);
  }
  state.counters["multiply_adds"] =
      benchmark::Counter(products, benchmark::Counter::kIsIterationInvariantRate);
}
BENCHMARK(BM_Attention)
    ->Unit(benchmark::kMillisecond)
    ->Args({512, 8, 0, 4, 1})  // A first chunk of the small model.
    ->Args({512, 8, 0, 4, 2})
    ->Args({64, 64, 4000, 4, 1})  // Part of a chunk of the model, all 512 entries selected.
    ->Args({64, 64, 14000, 128, 1})
    ->Args({1, 8, 4000, 4, 1})  // Decode.
    ->Args({1, 64, 4000, 4, 1})
    ->Args({1, 64, 4000, 4, 2})
    ->Args({1, 64, 14000, 128, 1});

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
