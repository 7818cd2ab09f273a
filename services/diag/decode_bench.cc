// SPDX-License-Identifier: Apache-2.0
#include "services/diag/decode_bench.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/base/status_macros.h"

namespace isthmus::diag {
namespace {

using SequencePointers = std::vector<engine::Sequence*>;

using OperationTimes = std::map<std::string, std::vector<double>>;

std::map<std::string, double> MediansOf(OperationTimes times) {
  std::map<std::string, double> medians;
  for (auto& [name, values] : times) medians[name] = Median(std::move(values));
  return medians;
}

absl::Status CheckPositive(absl::string_view field, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", must be positive"));
}

absl::StatusOr<double> SecondsOfSteps(LocalEngine& local, const SequencePointers& sequences,
                                      int64_t steps) {
  const absl::Time start = RealClock().Now();
  for (int64_t t = 0; t < steps; ++t) {
    ISTHMUS_RETURN_IF_ERROR(local.engine().Step(sequences));
  }
  return absl::ToDoubleSeconds(RealClock().Now() - start);
}

}  // namespace

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

absl::StatusOr<engine::Sequence> StartReply(LocalEngine& local, int64_t tokens, uint32_t seed,
                                            int64_t max_tokens) {
  std::mt19937 random(seed);
  const auto vocab = static_cast<uint32_t>(local.weights().config().vocab_size);
  std::vector<int32_t> prompt;
  prompt.reserve(static_cast<size_t>(tokens));
  for (int64_t t = 0; t < tokens; ++t) prompt.push_back(static_cast<int32_t>(random() % vocab));
  engine::SamplingParams sampling;
  sampling.max_tokens = max_tokens;
  sampling.ignores_end_token = true;
  ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence,
                           local.engine().Admit("bench", std::move(prompt), sampling));
  engine::Sequence* const pointer = &sequence;
  while (sequence.num_output_tokens() == 0) {
    ISTHMUS_RETURN_IF_ERROR(local.engine().Step({&pointer, 1}));
  }
  return sequence;
}

absl::StatusOr<std::vector<BatchPoint>> BenchBatches(LocalEngine& local, const BatchBench& bench) {
  ISTHMUS_RETURN_IF_ERROR(CheckPositive("context", bench.context));
  ISTHMUS_RETURN_IF_ERROR(CheckPositive("steps", bench.steps));
  ISTHMUS_RETURN_IF_ERROR(CheckPositive("rounds", bench.rounds));
  std::vector<BatchPoint> points;
  int64_t largest = 0;
  for (const int64_t batch : bench.batches) {
    ISTHMUS_RETURN_IF_ERROR(CheckPositive("batches", batch));
    points.push_back({.batch = batch, .tokens_per_s = {}, .ratios = {}, .operation_seconds = {}});
    largest = std::max(largest, batch);
  }
  std::vector<engine::Sequence> sequences;
  const int64_t turns = static_cast<int64_t>(bench.batches.size()) * (bench.rounds + 1);
  for (int64_t s = 0; s < largest; ++s) {
    ISTHMUS_ASSIGN_OR_RETURN(
        engine::Sequence sequence,
        StartReply(local, bench.context, static_cast<uint32_t>(s + 1), turns * bench.steps + 2));
    sequences.push_back(std::move(sequence));
  }
  std::vector<OperationTimes> operations(points.size());
  size_t next = 0;  // Small batches go around, so that all sequences grow about alike.
  for (int64_t round = 0; round <= bench.rounds; ++round) {
    for (BatchPoint& point : points) {
      SequencePointers batch;
      for (int64_t s = 0; s < point.batch; ++s) {
        batch.push_back(&sequences[next]);
        next = (next + 1) % sequences.size();
      }
      ISTHMUS_ASSIGN_OR_RETURN(const double seconds, SecondsOfSteps(local, batch, bench.steps));
      ISTHMUS_ASSIGN_OR_RETURN(const auto times, TimeOperations(local, batch));
      if (round == 0) continue;  // Memory is mapped and scratch grows.
      for (const auto& [name, value] : times) {
        operations[static_cast<size_t>(&point - points.data())][name].push_back(value);
      }
      point.tokens_per_s.push_back(static_cast<double>(point.batch * bench.steps) / seconds);
      point.ratios.push_back(point.tokens_per_s.back() / points[0].tokens_per_s.back());
    }
  }
  for (size_t p = 0; p < points.size(); ++p) {
    points[p].operation_seconds = MediansOf(std::move(operations[p]));
  }
  return points;
}

absl::StatusOr<std::map<std::string, double>> TimeOperations(
    LocalEngine& local, std::span<engine::Sequence* const> sequences) {
  if (kernels::IsDevice(local.exec().arch)) {
    return absl::UnimplementedError("operations are timed on the CPU only");
  }
  std::vector<int32_t> tokens;
  std::vector<int64_t> positions;
  std::vector<kernels::SequenceKv> views;
  std::vector<int32_t> logit_rows;
  model::ModelForward::StepInputs inputs;
  for (engine::Sequence* sequence : sequences) {
    const int64_t position = sequence->cache.num_tokens();
    const auto row = static_cast<int64_t>(tokens.size());
    ISTHMUS_RETURN_IF_ERROR(sequence->cache.Reserve(position + 1));
    views.push_back(sequence->cache.View(row, 1));
    tokens.push_back(sequence->tokens[static_cast<size_t>(position)]);
    positions.push_back(position);
    logit_rows.push_back(static_cast<int32_t>(row));
    inputs.max_tokens = std::max(inputs.max_tokens, position + 1);
  }
  const auto rows = static_cast<int64_t>(tokens.size());
  std::vector<float> logits(static_cast<size_t>(rows * local.forward().vocab_size()));
  std::map<std::string, double> seconds;
  std::string current;
  absl::Time since = RealClock().Now();
  const std::function<void(absl::string_view)> on_operation = [&](absl::string_view name) {
    const absl::Time now = RealClock().Now();
    if (!current.empty()) seconds[current] += absl::ToDoubleSeconds(now - since);
    current = std::string(name);
    since = now;
  };
  inputs.rows = rows;
  inputs.tokens = tokens.data();
  inputs.positions = positions;
  inputs.sequences = views;
  inputs.logit_rows = logit_rows;
  inputs.logits = kernels::F32Matrix(logits.data(), rows, local.forward().vocab_size());
  inputs.on_operation = &on_operation;
  model::ForwardBatch batch;
  batch.tokens = tokens;
  batch.sequences = views;
  ISTHMUS_RETURN_IF_ERROR(local.forward().Enqueue(batch, inputs, local.exec()));
  on_operation("");
  return seconds;
}

absl::StatusOr<std::vector<ContextPoint>> BenchContexts(LocalEngine& local,
                                                        const ContextBench& bench) {
  ISTHMUS_RETURN_IF_ERROR(CheckPositive("steps", bench.steps));
  ISTHMUS_RETURN_IF_ERROR(CheckPositive("rounds", bench.rounds));
  std::vector<ContextPoint> points;
  std::vector<engine::Sequence> sequences;
  for (const int64_t context : bench.contexts) {
    ISTHMUS_RETURN_IF_ERROR(CheckPositive("contexts", context));
    points.push_back({.context = context, .step_seconds = {}, .operation_seconds = {}});
    ISTHMUS_ASSIGN_OR_RETURN(engine::Sequence sequence,
                             StartReply(local, context, 1, (bench.rounds + 1) * bench.steps + 2));
    sequences.push_back(std::move(sequence));
  }
  std::vector<OperationTimes> operations(points.size());
  for (int64_t round = 0; round <= bench.rounds; ++round) {
    for (size_t p = 0; p < points.size(); ++p) {
      std::vector<double> steps;
      for (int64_t t = 0; t < bench.steps; ++t) {
        ISTHMUS_ASSIGN_OR_RETURN(const double seconds, SecondsOfSteps(local, {&sequences[p]}, 1));
        steps.push_back(seconds);
      }
      engine::Sequence* const sequence = &sequences[p];
      ISTHMUS_ASSIGN_OR_RETURN(const auto times, TimeOperations(local, {&sequence, 1}));
      if (round == 0) continue;
      points[p].step_seconds.push_back(Median(std::move(steps)));
      for (const auto& [name, seconds] : times) operations[p][name].push_back(seconds);
    }
  }
  for (size_t p = 0; p < points.size(); ++p) {
    points[p].operation_seconds = MediansOf(std::move(operations[p]));
  }
  return points;
}

}  // namespace isthmus::diag
