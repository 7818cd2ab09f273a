// SPDX-License-Identifier: Apache-2.0
// isthmus-diag bench batch and bench context: what decode steps yield for many sequences at once,
// and what they take for long ones.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "services/base/status_macros.h"
#include "services/diag/commands.h"
#include "services/diag/curve.h"
#include "services/diag/decode_bench.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

struct Flags {
  std::string checkpoint;
  std::string arithmetic = "reference";
  int threads = 0;
  std::string json;
  std::string svg;
};

absl::Status Write(const std::string& text, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::ofstream file(path);
  file << text;
  file.flush();
  return file ? absl::OkStatus() : absl::UnavailableError(absl::StrCat("cannot write ", path));
}

absl::StatusOr<std::unique_ptr<LocalEngine>> Open(const Flags& flags, int64_t max_tokens,
                                                  int64_t max_sequences) {
  LocalEngineOptions options;
  options.checkpoint = flags.checkpoint;
  ISTHMUS_ASSIGN_OR_RETURN(options.arithmetic, ParseArithmetic(flags.arithmetic));
  options.threads = flags.threads;
  options.max_tokens = max_tokens;
  options.max_sequences = static_cast<int32_t>(max_sequences);
  return LocalEngine::Create(options);
}

// Microseconds of each operation per sequence, so that what a batch shares shows.
void PrintOperations(const std::vector<BatchPoint>& points) {
  for (const auto& [name, unused] : points[0].operation_seconds) {
    std::cout << absl::StrFormat("%-26s", name);
    for (const BatchPoint& point : points) {
      const double seconds = point.operation_seconds.at(name);
      std::cout << absl::StrFormat(" %7.1f", 1e6 * seconds / static_cast<double>(point.batch));
    }
    std::cout << " us per sequence\n";
  }
}

absl::Status RunBatch(const Flags& flags, const BatchBench& bench) {
  const int64_t largest = *std::max_element(bench.batches.begin(), bench.batches.end());
  const int64_t turns = static_cast<int64_t>(bench.batches.size()) * (bench.rounds + 1);
  const int64_t longest = bench.context + turns * bench.steps + 512;
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalEngine> local,
                           Open(flags, largest * longest, largest));
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<BatchPoint> points, BenchBatches(*local, bench));
  ordered_json rows = ordered_json::array();
  std::cout << "sequences  tokens/s  to one\n";
  for (const BatchPoint& point : points) {
    const double speed = Median(point.tokens_per_s);
    const double ratio = Median(point.ratios);
    std::cout << absl::StrFormat("%9d %9.0f %7.2f\n", point.batch, speed, ratio);
    rows.push_back({{"sequences", point.batch},
                    {"tokens_per_s_median", speed},
                    {"ratio_median", ratio},
                    {"operation_seconds", point.operation_seconds},
                    {"tokens_per_s", point.tokens_per_s},
                    {"ratios", point.ratios}});
  }
  PrintOperations(points);
  const ordered_json record = {
      {"arithmetic", flags.arithmetic}, {"threads", local->exec().threads->num_threads()},
      {"context", bench.context},       {"steps", bench.steps},
      {"rounds", bench.rounds},         {"results", rows}};
  return Write(flags.json.empty() ? "" : record.dump(1) + "\n", flags.json);
}

// Milliseconds of a step and of what grows in it, over the context.
Curve CurveOf(const std::vector<ContextPoint>& points) {
  Curve curve = {.title = "Decode step over context",
                 .x_label = "tokens in the cache",
                 .y_label = "milliseconds",
                 .series = {{"whole step", {}}, {"index scan", {}}, {"attention", {}}}};
  for (const ContextPoint& point : points) {
    const auto x = static_cast<double>(point.context);
    const auto add = [x, &curve](size_t series, double seconds) {
      curve.series[series].points.emplace_back(x, 1e3 * seconds);
    };
    add(0, Median(point.step_seconds));
    add(1, point.operation_seconds.at("indexer"));
    add(2, point.operation_seconds.at("attention"));
  }
  return curve;
}

absl::Status RunContext(const Flags& flags, const ContextBench& bench) {
  const int64_t room = (bench.rounds + 1) * bench.steps + 512;
  const auto count = static_cast<int64_t>(bench.contexts.size());
  const int64_t tokens = std::accumulate(bench.contexts.begin(), bench.contexts.end(), int64_t{0});
  ISTHMUS_ASSIGN_OR_RETURN(const std::unique_ptr<LocalEngine> local,
                           Open(flags, tokens + count * room, count));
  ISTHMUS_ASSIGN_OR_RETURN(const std::vector<ContextPoint> points, BenchContexts(*local, bench));
  ordered_json rows = ordered_json::array();
  std::cout << "  context  step ms  index ms  attention ms\n";
  for (const ContextPoint& point : points) {
    const double step = 1e3 * Median(point.step_seconds);
    const double index = 1e3 * point.operation_seconds.at("indexer");
    const double attention = 1e3 * point.operation_seconds.at("attention");
    std::cout << absl::StrFormat("%9d %8.3f %9.3f %13.3f\n", point.context, step, index, attention);
    rows.push_back({{"context", point.context},
                    {"step_ms_median", step},
                    {"index_scan_ms_median", index},
                    {"attention_ms_median", attention},
                    {"step_seconds", point.step_seconds}});
  }
  const ordered_json record = {{"arithmetic", flags.arithmetic},
                               {"threads", local->exec().threads->num_threads()},
                               {"steps", bench.steps},
                               {"rounds", bench.rounds},
                               {"results", rows}};
  ISTHMUS_RETURN_IF_ERROR(Write(flags.json.empty() ? "" : record.dump(1) + "\n", flags.json));
  return Write(CurveSvg(CurveOf(points)), flags.svg);
}

void AddFlags(CLI::App* command, Flags& flags) {
  command->add_option("--checkpoint", flags.checkpoint, "Checkpoint directory")->required();
  command->add_option("--arithmetic", flags.arithmetic, "math or reference")->capture_default_str();
  command->add_option("--threads", flags.threads, "0: one per processor")
      ->check(CLI::Range(0, 256))
      ->capture_default_str();
  command->add_option("--json", flags.json, "File for the record");
}

}  // namespace

void AddDecodeBenchCommands(CLI::App* bench, absl::Status& status) {
  const CLI::Range positive(int64_t{1}, int64_t{1} << 20);
  auto flags = std::make_shared<Flags>();
  auto batch = std::make_shared<BatchBench>();
  CLI::App* command =
      bench->add_subcommand("batch", "Decode tokens per second of 1 to 32 sequences, by turns");
  AddFlags(command, *flags);
  command->add_option("--batches", batch->batches, "Sequences, separated by commas; 1 first")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str();
  command->add_option("--context", batch->context, "Prompt tokens of each")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--steps", batch->steps, "Steps in a row")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--rounds", batch->rounds, "Measured rounds")
      ->check(positive)
      ->capture_default_str();
  command->callback([flags, batch, &status] { status = RunBatch(*flags, *batch); });

  auto long_flags = std::make_shared<Flags>();
  auto contexts = std::make_shared<ContextBench>();
  command = bench->add_subcommand("context", "Decode step of sequences of several lengths");
  AddFlags(command, *long_flags);
  command->add_option("--contexts", contexts->contexts, "Tokens, separated by commas")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{128}, int64_t{1} << 22))
      ->capture_default_str();
  command->add_option("--steps", contexts->steps, "Steps in a row")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--rounds", contexts->rounds, "Measured rounds")
      ->check(positive)
      ->capture_default_str();
  command->add_option("--svg", long_flags->svg, "File for the curve");
  command->callback(
      [long_flags, contexts, &status] { status = RunContext(*long_flags, *contexts); });
}

}  // namespace isthmus::diag
