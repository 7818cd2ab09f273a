// SPDX-License-Identifier: Apache-2.0
// Times of drawing tokens on the host from rows of the real vocabulary: one row by what the request
// asks for, and a batch on some threads.
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "benchmark/benchmark.h"
#include "kernels/core/workspace.h"
#include "kernels/patches.h"
#include "kernels/sampling/sampling.h"
#include "services/base/thread_pool.h"
#include "services/engine/sampler.h"

namespace isthmus::engine {
namespace {

constexpr int64_t kVocab = 129280;
constexpr int64_t kLongPrompt = 500'000;
constexpr SamplerModel kModel = {.vocab_size = kVocab, .max_positions = 1 << 20};

// In [0, 1).
double Uniform(uint64_t seed, int64_t i) {
  return double{kernels::UniformAt(seed, static_cast<uint64_t>(i))};
}

// Normal values with the given deviation: 3 leaves 11,000 tokens within 95 % of the mass. A peaked
// row has some 40 tokens far above such a floor, as a model that knows what comes next gives it.
std::vector<float> Row(uint64_t seed, float deviation, bool is_peaked) {
  std::vector<float> row(kVocab);
  for (int64_t id = 0; id < kVocab; ++id) {
    const double radius = std::sqrt(-2.0 * std::log(1.0 - Uniform(seed, 2 * id)));
    const double value = radius * std::cos(6.283185307 * Uniform(seed, 2 * id + 1));
    row[static_cast<size_t>(id)] = deviation * static_cast<float>(value);
  }
  if (!is_peaked) return row;
  for (int64_t i = 0; i < 40; ++i) {
    row[static_cast<size_t>(i * 3001 % kVocab)] = 26.0f - 0.4f * static_cast<float>(i);
  }
  return row;
}

Sequence SequenceOf(const SamplingParams& sampling, int64_t num_prompt, bool is_uniform) {
  Sequence sequence;
  sequence.num_prompt_tokens = num_prompt;
  for (int64_t i = 0; i < num_prompt; ++i) {
    // As often as words of a language, or all alike.
    const double u = Uniform(3, i);
    const double id = is_uniform ? u * kVocab : std::exp(u * std::log(double{kVocab})) - 1.0;
    sequence.tokens.push_back(static_cast<int32_t>(id));
  }
  sequence.sampling = sampling;
  sequence.sampling.max_tokens = 1 << 30;
  return sequence;
}

void DrawOne(benchmark::State& state, const SamplingParams& sampling, int64_t num_prompt,
             bool is_peaked, bool is_uniform, bool has_patches) {
  const std::vector<float> row = Row(7, 3.0f, is_peaked);
  Sequence sequence = SequenceOf(sampling, num_prompt, is_uniform);
  const auto patches = *kernels::ResolvePatches(
      has_patches ? std::map<std::string, bool>() : kernels::NoPatches(), false);
  kernels::Workspace workspace;
  const kernels::Exec exec = {.patches = &patches, .workspace = &workspace};
  for (auto _ : state) {
    auto gain = DrawTokens(sequence, {}, kernels::F32Vector(row.data(), kVocab), kModel, exec);
    if (!gain.ok()) state.SkipWithError("refused");
    Append(*std::move(gain), sequence);
    sequence.finish = FinishReason::kNone;
    sequence.logprobs.clear();
  }
}

void DrawBatch(benchmark::State& state, const SamplingParams& sampling, bool has_patches) {
  constexpr int64_t kRows = 64;
  const auto threads = static_cast<int>(state.range(0));
  ThreadPool pool(threads);
  std::vector<std::vector<float>> rows;
  std::vector<Sequence> sequences;
  for (uint64_t i = 0; i < kRows; ++i) {
    rows.push_back(Row(i, 3.0f, i % 2 == 0));
    sequences.push_back(SequenceOf(sampling, 1000, false));
    sequences.back().sampling.seed = i;
  }
  const auto patches = *kernels::ResolvePatches(
      has_patches ? std::map<std::string, bool>() : kernels::NoPatches(), false);
  kernels::Workspace workspace;
  workspace.Reserve(DrawScratchBytes(kVocab, threads));
  const kernels::Exec exec = {.patches = &patches, .threads = &pool, .workspace = &workspace};
  const auto draw = [&](int64_t index, const kernels::Exec& own) -> absl::Status {
    const auto i = static_cast<size_t>(index);
    auto gain =
        DrawTokens(sequences[i], {}, kernels::F32Vector(rows[i].data(), kVocab), kModel, own);
    if (!gain.ok()) return gain.status();
    Append(*std::move(gain), sequences[i]);
    sequences[i].finish = FinishReason::kNone;
    return absl::OkStatus();
  };
  for (auto _ : state) {
    if (!ForEachRow(kRows, kVocab, exec, draw).ok()) state.SkipWithError("refused");
  }
  state.SetItemsProcessed(state.iterations() * kRows);
}

void RegisterAll() {
  struct Case {
    const char* name;
    SamplingParams sampling;
    int64_t num_prompt = 1000;
    bool is_uniform = false;
  };
  const std::vector<Case> cases = {
      {"greedy", {}},
      {"top_p", {.temperature = 1.0f, .top_p = 0.95f}},
      {"temperature", {.temperature = 1.0f}},
      {"min_p", {.temperature = 1.0f, .min_p = 0.05f}},
      {"top_k", {.temperature = 1.0f, .top_k = 50}},
      {"penalties", {.repetition_penalty = 1.1f, .frequency_penalty = 0.2f}, kLongPrompt},
      {"penalties_all_ids",
       {.repetition_penalty = 1.1f, .frequency_penalty = 0.2f},
       kLongPrompt,
       true},
      {"biases", {.logit_bias = {{5, 1.0f}, {77, -1.0f}}}},
      {"logprobs", {.top_logprobs = 20}}};
  for (const Case& c : cases) {
    for (const bool is_peaked : {false, true}) {
      for (const bool has_patches : {false, true}) {
        const std::string name = std::string("row/") + c.name + (is_peaked ? "/peaked" : "/flat") +
                                 (has_patches ? "/patched" : "/trusted");
        benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) {
          DrawOne(state, c.sampling, c.num_prompt, is_peaked, c.is_uniform, has_patches);
        })->Unit(benchmark::kMicrosecond);
      }
    }
  }
  for (const bool has_patches : {false, true}) {
    const std::string name = std::string("batch64/top_p") + (has_patches ? "/patched" : "/trusted");
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& state) {
                                   DrawBatch(state, {.temperature = 1.0f, .top_p = 0.95f},
                                             has_patches);
                                 })
        ->Arg(1)
        ->Arg(2)
        ->Unit(benchmark::kMicrosecond)
        ->UseRealTime();
  }
}

}  // namespace
}  // namespace isthmus::engine

int main(int argc, char** argv) {
  isthmus::engine::RegisterAll();
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
