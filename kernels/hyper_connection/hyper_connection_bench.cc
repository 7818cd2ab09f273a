// SPDX-License-Identifier: Apache-2.0
// Times of the hyper-connection operations: tokens x hidden as the argument pair. Pre includes its
// GEMM. Post reads y and the streams once and writes the streams once.
#include "benchmark/benchmark.h"
#include "kernels/core/workspace.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/hyper_connection/hyper_connection_cases.h"

namespace isthmus::kernels {
namespace {

void BM_Pre(benchmark::State& state) {
  PreCase c(1, state.range(0), state.range(1));
  c.packed = true;
  const HyperConnectionPreArgs args = c.Args();
  Workspace workspace;
  const Exec exec = {.workspace = &workspace};
  for (auto _ : state) {
    if (!HyperConnectionPre(args, exec).ok()) state.SkipWithError("refused");
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * state.range(1) * 5 * 4);
}
BENCHMARK(BM_Pre)->Args({1, 256})->Args({512, 256})->Args({1, 4096})->Args({512, 4096});

void BM_Post(benchmark::State& state) {
  PostCase c(1, state.range(0), state.range(1));
  const HyperConnectionPostArgs args = c.Args();
  for (auto _ : state) {
    if (!HyperConnectionPost(args, Exec{}).ok()) state.SkipWithError("refused");
  }
  state.SetBytesProcessed(state.iterations() * state.range(0) * state.range(1) * 9 * 4);
}
BENCHMARK(BM_Post)->Args({1, 256})->Args({512, 256})->Args({1, 4096})->Args({512, 4096});

void BM_Head(benchmark::State& state) {
  HeadCase c(1, state.range(0), state.range(1));
  c.packed = true;
  const HyperConnectionHeadArgs args = c.Args();
  Workspace workspace;
  const Exec exec = {.workspace = &workspace};
  for (auto _ : state) {
    if (!HyperConnectionHead(args, exec).ok()) state.SkipWithError("refused");
  }
}
BENCHMARK(BM_Head)->Args({1, 4096})->Args({16, 4096});

void BM_SplitMixes(benchmark::State& state) {
  const std::vector<float> mixes = testing::NormalValues(1, kNumMixes);
  const std::vector<float> base = testing::NormalValues(2, kNumMixes);
  const float scale[] = {0.5f, 0.75f, 1.25f};
  float pre[4], post[4], comb[16];
  for (auto _ : state) {
    SplitMixes(mixes.data(), scale, base.data(), 20, 1e-6f, pre, post, comb);
    benchmark::DoNotOptimize(comb);
  }
}
BENCHMARK(BM_SplitMixes);

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
