// SPDX-License-Identifier: Apache-2.0
// Times of rms_norm: tokens x hidden as the argument pair. Bound by memory: x is read and out
// written once.
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

void BM_RmsNorm(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int64_t hidden = state.range(1);
  std::vector<float> x = testing::NormalValues(1, tokens * hidden);
  const std::vector<float> weight = testing::NormalValues(2, hidden);
  std::vector<float> out(x.size());
  const RmsNormArgs args = {.x = F32Matrix(x.data(), tokens, hidden),
                            .weight = F32Vector(weight.data(), hidden),
                            .out = F32Matrix(out.data(), tokens, hidden)};
  for (auto _ : state) {
    if (!RmsNorm(args, Exec{}).ok()) state.SkipWithError("refused");
  }
  state.SetBytesProcessed(state.iterations() * tokens * hidden * 8);
}
BENCHMARK(BM_RmsNorm)->Args({1, 256})->Args({512, 256})->Args({1, 4096})->Args({512, 4096});
// The per-head norm of one token's query, and of 64 tokens.
BENCHMARK(BM_RmsNorm)->Args({64, 512})->Args({4096, 512});

}  // namespace
}  // namespace isthmus::kernels

BENCHMARK_MAIN();
