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
constexpr int64_t kWindows = 60;          // Points of the curve.
constexpr int64_t kJudgedTokens = 20000;  // Shorter replies say nothing about time.
// What malloc, the threads' stacks and the test's own lists may add.
constexpr int64_t kSlackBytes = int64_t{512} << 10;

int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0;
  int64_t resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

engine::MemoryPlan PlanOf(int64_t tokens) {
  const model::ModelConfig config = *model::LoadModelConfig(kCheckpoint);
  const auto layout =
      *kernels::KvLayout::Create(model::GeometryOf(config, kernels::Arithmetic::kReference, 256));
  engine::MemoryNeeds needs;
  needs.weight_bytes = *model::WeightBytes(config, *model::StoredExpertFormat(kCheckpoint, config));
  needs.step_bytes = model::StepBytes(
      config, {.rows = kPrompt, .sequences = 1, .max_tokens = tokens, .threads = 2});
  needs.chunk_tokens = kPrompt;
  needs.max_positions = config.max_position_embeddings;
  needs.max_sequence_tokens = tokens;
  needs.cache_tokens = tokens;
  return *engine::PlanMemory(layout, needs);
}

// Has every byte of the cache and of the largest step's scratch committed, so that from here on
// nothing may grow any more. What a step does at the last position does not depend on what is
// there.
void TouchAll(diag::LocalEngine& local, int64_t tokens) {
  kv::CachePool& pool = local.pool();
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    kv::PagePool& pages = pool.pages(static_cast<kernels::CacheKindIndex>(k));
    for (int32_t page = 0; page < pages.num_pages(); ++page) ASSERT_TRUE(pages.Clear(page).ok());
  }
  kv::SequenceCache cache = *pool.Open();
  ASSERT_TRUE(cache.Reserve(tokens).ok());
  ASSERT_TRUE(cache.SetNumTokens(tokens - 1).ok());
  const kernels::SequenceKv view = cache.View(0, 1);
  const std::vector<int32_t> token = {77};
  const std::vector<int64_t> logit_row = {0};
  std::vector<float> logits(static_cast<size_t>(local.forward().vocab_size()));
  ASSERT_TRUE(
      local.forward()
          .Run({.tokens = token,
                .sequences = {&view, 1},
                .logit_rows = logit_row,
                .logits = kernels::F32Matrix(logits.data(), 1, local.forward().vocab_size())},
               local.exec())
          .ok());
  // Pages keep what this step wrote at the last position until the reply arrives there itself.
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
  options.threads = 2;
  options.max_tokens = plan.cache_tokens;
  options.max_sequences = static_cast<int32_t>(plan.max_sequences);
  const auto local = *diag::LocalEngine::Create(options);
  const int64_t without_cache = ResidentBytes();
  TouchAll(*local, total);
  engine::Sequence sequence = *diag::StartReply(*local, kPrompt, 1, reply_tokens);
  sequence.tokens.resize(static_cast<size_t>(total));  // Committed, as all else is.
  sequence.tokens.resize(static_cast<size_t>(kPrompt + 1));
  const int64_t start = ResidentBytes();

  // The cache is as large as planned, and a step's scratch memory no larger.
  const int64_t lists = 4 * total;
  if (!kIsSanitized) {
    EXPECT_GE(start - without_cache, plan.pool_bytes * 99 / 100);
    EXPECT_LE(start - without_cache,
              plan.pool_bytes * 101 / 100 + plan.step_bytes + lists + kSlackBytes);
    EXPECT_LE(start - before, plan.total_bytes * 101 / 100 + lists + (int64_t{8} << 20));
  }

  std::vector<Point> points;
  while (!sequence.is_finished()) {
    absl::StatusOr<Point> point =
        RunWindow(*local, sequence, std::max<int64_t>(1, reply_tokens / kWindows));
    ASSERT_TRUE(point.ok()) << point.status();
    points.push_back(*point);
    // Within 1 % of what was there when all of it had been committed.
    const int64_t allowed = plan.total_bytes / 100 + kSlackBytes;
    if (!kIsSanitized) {
      ASSERT_LE(std::abs(point->resident_bytes - start), allowed) << "at " << point->tokens;
    }
    if (reply_tokens >= kJudgedTokens) {
      std::cout << point->tokens << " tokens, step " << point->step_ms << " ms, index scan "
                << point->index_ms << " ms, attention " << point->attention_ms << " ms, "
                << point->resident_bytes << " bytes resident" << std::endl;
    }
    WriteCurve(points, plan);
  }
  EXPECT_EQ(sequence.num_output_tokens(), reply_tokens);
  EXPECT_EQ(sequence.finish, engine::FinishReason::kLength);
  RecordProperty("planned_bytes", std::to_string(plan.total_bytes));
  RecordProperty("resident_bytes", std::to_string(start - before));
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
