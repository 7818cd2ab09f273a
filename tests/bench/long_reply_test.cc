// SPDX-License-Identifier: Apache-2.0
// One reply as long as asked for, on the bundled model: no engine of ours may stop at some length,
// grow in memory, or take longer for anything but what must be scanned.
//
//   long_reply_test --tokens=300000 --curve=PREFIX
//
// writes PREFIX.json and PREFIX.svg. Without flags the reply has 3,000 tokens, and times, which say
// nothing over so short a way on a shared machine, are not judged.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "services/base/clock.h"
#include "services/diag/curve.h"
#include "services/diag/decode_bench.h"
#include "services/engine/memory_plan.h"
#include "services/model/step_memory.h"

namespace isthmus {
namespace {

// Sanitizers keep shadows and freed memory, and are slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kIsSanitized = true;
#else
constexpr bool kIsSanitized = false;
#endif

int64_t reply_tokens = kIsSanitized ? 400 : 3000;
std::string curve_prefix;

constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";
constexpr int64_t kPrompt = 64;
constexpr int kThreads = 2;
constexpr int64_t kWindows = 60;          // Points of the curve.
constexpr int64_t kJudgedTokens = 20000;  // Shorter replies say nothing about time.
// What is no part of a plan, whatever its size, and less than 1 % of a long reply's: views of the
// weights, the threads' stacks, what malloc keeps.
constexpr int64_t kUnplannedBytes = int64_t{768} << 10;

// Of memory that the process wrote: its code and the checkpoint's files, which the system may drop
// and read again, are not counted.
int64_t ResidentBytes() {
  std::ifstream status("/proc/self/status");
  int64_t kilobytes = 0;
  for (std::string line; std::getline(status, line);) {
    absl::string_view value = line;
    if (!absl::ConsumePrefix(&value, "RssAnon:") && !absl::ConsumePrefix(&value, "RssShmem:")) {
      continue;
    }
    int64_t more = 0;
    absl::ConsumeSuffix(&value, "kB");
    if (absl::SimpleAtoi(absl::StripAsciiWhitespace(value), &more)) kilobytes += more;
  }
  return kilobytes << 10;
}

model::ModelConfig BundledConfig() { return *model::LoadModelConfig(kCheckpoint); }

engine::StepMemory StepMemoryOf(int64_t tokens) {
  return engine::PlanStepMemory(BundledConfig(), kPrompt, /*max_sequences=*/1, tokens, kThreads,
                                kernels::Arithmetic::kReference);
}

engine::MemoryPlan PlanOf(int64_t tokens) {
  const model::ModelConfig config = BundledConfig();
  const auto layout =
      *kernels::KvLayout::Create(model::GeometryOf(config, kernels::Arithmetic::kReference, 256));
  engine::MemoryNeeds needs;
  needs.weight_bytes = *model::WeightBytes(config, *model::StoredExpertFormat(kCheckpoint, config));
  needs.step_bytes = StepMemoryOf(tokens).bytes();
  needs.chunk_tokens = kPrompt;
  needs.max_positions = config.max_position_embeddings;
  needs.max_sequence_tokens = tokens;
  needs.cache_tokens = tokens;
  return *engine::PlanMemory(layout, needs);
}

// Steps of as many rows as there ever are: at the end of the cache, where most is scanned, and
// where a chunk just shares the entries that its rows select. What a step takes does not depend on
// what lies in the cache.
void TouchScratch(diag::LocalEngine& local, int64_t tokens) {
  const int64_t rows = kPrompt + 1;
  const std::vector<int32_t> prompt(static_cast<size_t>(rows), 77);
  kv::SequenceCache cache = *local.pool().Open();
  ASSERT_TRUE(cache.Reserve(tokens).ok());
  const int64_t shared = 2 * rows * local.weights().config().index_topk;
  for (const int64_t end : {std::min(shared, tokens), tokens}) {
    ASSERT_TRUE(cache.SetNumTokens(end - rows).ok());
    const kernels::SequenceKv view = cache.View(0, rows);
    model::ForwardBatch batch;
    batch.tokens = prompt;
    batch.sequences = {&view, 1};
    ASSERT_TRUE(local.forward().Run(batch, local.exec()).ok());
  }
  // Pages keep what these steps wrote until the reply arrives there itself.
}

// A prompt whose log probabilities are wanted has logits in every row.
void TouchLogits(diag::LocalEngine& local) {
  engine::SamplingParams sampling;
  sampling.max_tokens = 1;
  sampling.temperature = 1.0f;
  sampling.repetition_penalty = 1.5f;
  sampling.top_prompt_logprobs = 1;
  const std::vector<int32_t> prompt(static_cast<size_t>(kPrompt + 1), 77);
  engine::Sequence sequence = *local.engine().Admit("logits", prompt, sampling);
  engine::Sequence* const pointer = &sequence;
  while (!sequence.is_finished()) ASSERT_TRUE(local.engine().Step({&pointer, 1}).ok());
}

// Has every byte of the cache and of the largest step committed, so that from here on nothing may
// grow any more.
void TouchAll(diag::LocalEngine& local, int64_t tokens) {
  kv::CachePool& pool = local.pool();
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    kv::PagePool& pages = pool.pages(static_cast<kernels::CacheKindIndex>(k));
    for (int32_t page = 0; page < pages.num_pages(); ++page) ASSERT_TRUE(pages.Clear(page).ok());
  }
  TouchScratch(local, tokens);
  TouchLogits(local);
}

struct Point {
  int64_t tokens = 0;         // In the cache.
  double step_ms = 0.0;       // Of the window's steps, the slowest of the fastest tenth.
  double index_ms = 0.0;      // The indexer's part of one step, at the window's end.
  double attention_ms = 0.0;  // The attention's.
  double rest_ms = 0.0;       // All else of such a step.
  int64_t resident_bytes = 0;
};

// Steps of one window of the reply. Others may take the machine at any time, and for minutes, so
// what counts is what the fastest steps take.
absl::StatusOr<Point> RunWindow(diag::LocalEngine& local, engine::Sequence& sequence,
                                int64_t steps) {
  engine::Sequence* const pointer = &sequence;
  std::vector<double> milliseconds;
  for (int64_t t = 0; t < steps && !sequence.is_finished(); ++t) {
    const absl::Time start = RealClock().Now();
    const absl::Status status = local.engine().Step({&pointer, 1});
    if (!status.ok()) return status;
    milliseconds.push_back(absl::ToDoubleMilliseconds(RealClock().Now() - start));
  }
  Point point;
  point.tokens = sequence.cache.num_tokens();
  std::ranges::sort(milliseconds);
  point.step_ms = milliseconds[milliseconds.size() / 10];
  if (!sequence.is_finished()) {
    std::vector<double> index;
    std::vector<double> attention;
    std::vector<double> rest;
    for (int i = 0; i < 9; ++i) {
      const auto seconds = diag::TimeOperations(local, {&pointer, 1});
      if (!seconds.ok()) return seconds.status();
      index.push_back(1e3 * seconds->at("indexer"));
      attention.push_back(1e3 * seconds->at("attention"));
      // Summed up rather than taken from the step's time: a small difference of two large times
      // would be noise.
      double others = 0.0;
      for (const auto& [name, value] : *seconds) {
        if (name != "indexer" && name != "attention") others += 1e3 * value;
      }
      rest.push_back(others);
    }
    point.index_ms = std::ranges::min(index);
    point.attention_ms = std::ranges::min(attention);
    point.rest_ms = std::ranges::min(rest);
  }
  point.resident_bytes = ResidentBytes();
  return point;
}

void WriteCurve(const std::vector<Point>& points, const engine::MemoryPlan& plan) {
  if (curve_prefix.empty()) return;
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  diag::Curve curve = {.title = "One reply on the bundled model",
                       .x_label = "tokens in the cache",
                       .y_label = "milliseconds of a step",
                       .series = {{"whole step", {}}, {"index scan", {}}, {"attention", {}}}};
  for (const Point& point : points) {
    rows.push_back({{"tokens", point.tokens},
                    {"step_ms", point.step_ms},
                    {"index_scan_ms", point.index_ms},
                    {"attention_ms", point.attention_ms},
                    {"rest_ms", point.rest_ms},
                    {"resident_bytes", point.resident_bytes}});
    const auto x = static_cast<double>(point.tokens);
    curve.series[0].points.emplace_back(x, point.step_ms);
    if (point.index_ms == 0.0) continue;
    curve.series[1].points.emplace_back(x, point.index_ms);
    curve.series[2].points.emplace_back(x, point.attention_ms);
  }
  const nlohmann::ordered_json record = {
      {"planned_bytes", plan.total_bytes}, {"pool_bytes", plan.pool_bytes}, {"points", rows}};
  std::ofstream(curve_prefix + ".json") << record.dump(1) << "\n";
  std::ofstream(curve_prefix + ".svg") << diag::CurveSvg(curve);
}

double MedianOf(const std::vector<Point>& points, size_t begin, size_t end,
                const std::function<double(const Point&)>& value) {
  std::vector<double> values;
  for (size_t i = begin; i < end; ++i) values.push_back(value(points[i]));
  return diag::Median(std::move(values));
}

// Least squares over points [begin, end): milliseconds per token.
double SlopeOf(const std::vector<Point>& points, size_t begin, size_t end) {
  double n = 0, sum_x = 0, sum_y = 0, sum_xx = 0, sum_xy = 0;
  for (size_t i = begin; i < end; ++i) {
    const auto x = static_cast<double>(points[i].tokens);
    n += 1;
    sum_x += x;
    sum_y += points[i].step_ms;
    sum_xx += x * x;
    sum_xy += x * points[i].step_ms;
  }
  return (n * sum_xy - sum_x * sum_y) / (n * sum_xx - sum_x * sum_x);
}

// What neither scans keys nor attends to entries takes the same at the end as in the beginning, and
// the whole grows no faster in the second half than in the first.
void JudgeTimes(const std::vector<Point>& points) {
  const size_t last = points.size() - 1;  // Its operations were not timed.
  const size_t part = points.size() / 6;
  const auto rest = [](const Point& p) { return p.rest_ms; };
  const double first = MedianOf(points, 0, part, rest);
  const double final = MedianOf(points, last - part, last, rest);
  EXPECT_LT(final, 1.3 * first + 0.1);
  EXPECT_LT(SlopeOf(points, last / 2, last), 1.5 * SlopeOf(points, 0, last / 2) + 1e-6);
}

TEST(LongReplyTest, KeepsToTheMemoryPlanAndGrowsWithTheScanAlone) {
  const int64_t total = kPrompt + reply_tokens;
  const engine::MemoryPlan plan = PlanOf(total);
  const int64_t before = ResidentBytes();
  diag::LocalEngineOptions options;
  options.checkpoint = kCheckpoint;
  options.threads = kThreads;
  options.scratch_bytes = StepMemoryOf(total).scratch_bytes;
  options.max_tokens = plan.cache_tokens;
  options.max_sequences = static_cast<int32_t>(plan.max_sequences);
  const auto local = *diag::LocalEngine::Create(options);
  TouchAll(*local, total);
  engine::Sequence sequence = *diag::StartReply(*local, kPrompt, 1, reply_tokens);
  sequence.tokens.resize(static_cast<size_t>(total));  // Committed, as all else is.
  sequence.tokens.resize(static_cast<size_t>(kPrompt + 1));
  const int64_t start = ResidentBytes();

  // What was planned, and the tokens of the reply, is resident: no more, and no less.
  const int64_t planned = plan.total_bytes + 4 * total;
  const int64_t allowed = std::max(planned / 100, kUnplannedBytes);
  const auto expect_planned = [&](int64_t resident, int64_t tokens) {
    if (kIsSanitized) return;
    EXPECT_LE(std::abs(resident - before - planned), allowed)
        << resident - before << " bytes resident, " << planned << " planned, at " << tokens;
  };
  expect_planned(start, 0);
  RecordProperty("planned_bytes", std::to_string(planned));
  RecordProperty("resident_bytes", std::to_string(start - before));
  std::vector<Point> points;
  while (!sequence.is_finished()) {
    absl::StatusOr<Point> point =
        RunWindow(*local, sequence, std::max<int64_t>(1, reply_tokens / kWindows));
    ASSERT_TRUE(point.ok()) << point.status();
    points.push_back(*point);
    expect_planned(point->resident_bytes, point->tokens);
    if (testing::Test::HasFailure()) return;
    if (reply_tokens >= kJudgedTokens) {
      std::cout << point->tokens << " tokens, step " << point->step_ms << " ms, index scan "
                << point->index_ms << " ms, attention " << point->attention_ms << " ms, "
                << point->resident_bytes - before << " bytes resident" << std::endl;
    }
    WriteCurve(points, plan);
  }
  EXPECT_EQ(sequence.num_output_tokens(), reply_tokens);
  EXPECT_EQ(sequence.finish, engine::FinishReason::kLength);
  if (reply_tokens >= kJudgedTokens) JudgeTimes(points);
}

}  // namespace
}  // namespace isthmus

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    if (absl::ConsumePrefix(&flag, "--tokens=")) {
      if (!absl::SimpleAtoi(flag, &isthmus::reply_tokens) || isthmus::reply_tokens < 100) {
        std::cerr << "--tokens: is " << flag << ", want a number from 100 on\n";
        return 2;
      }
    } else if (absl::ConsumePrefix(&flag, "--curve=")) {
      isthmus::curve_prefix = std::string(flag);
    } else {
      std::cerr << "unknown flag " << flag << "\n";
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
