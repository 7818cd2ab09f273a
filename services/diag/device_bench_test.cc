// SPDX-License-Identifier: Apache-2.0
// The measurements of a GPU run to their end on a miniature, alone and with two ranks, and their
// records have what is read out of them. Times mean nothing in an emulator.
#include <gtest/gtest.h>

#include "kernels/testing/device.h"
#include "services/diag/all_reduce_bench.h"
#include "services/diag/kernel_bench.h"
#include "services/diag/sampling_bench.h"
#include "services/diag/step_bench.h"

namespace isthmus::diag {
namespace {

StepBenchFlags Miniature() {
  StepBenchFlags flags;
  flags.shape = "miniature";
  flags.layers = 3;
  flags.batch = 2;
  flags.context = 150;
  flags.replays = 3;
  flags.seconds = 0.01;
  return flags;
}

void ExpectWhole(const nlohmann::ordered_json& record) {
  EXPECT_GT(record["step"]["ms"].get<double>(), 0.0);
  EXPECT_GE(record["step"]["replays_ms"].size(), 3u);
  ASSERT_EQ(record["touched_experts"].size(), 3u);
  for (const auto& touched : record["touched_experts"]) {
    EXPECT_GE(touched.get<int>(), 2);
    EXPECT_LE(touched.get<int>(), 4);  // Two tokens, two experts each.
  }
  EXPECT_GT(record["bytes"]["all"].get<int64_t>(), record["bytes"]["routed"].get<int64_t>());
  EXPECT_GE(record["operations"].size(), 15u);
}

TEST(DeviceBenchTest, AStepAlone) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto record = RunStepBench(Miniature());
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectWhole(*record);
}

TEST(DeviceBenchTest, AStepThatDrawsItsTokens) {
  ISTHMUS_REQUIRE_DEVICE();
  StepBenchFlags flags = Miniature();
  flags.layers = flags.batch = 1;
  const auto num_draws = [&] {
    const auto record = RunStepBench(flags);
    EXPECT_TRUE(record.ok()) << record.status();
    int draws = 0;
    for (const auto& operation : (*record)["operations"]) draws += operation["name"] == "sampling";
    return draws;
  };
  EXPECT_EQ(num_draws(), 0);
  flags.patches["sampling.on_device"] = true;
  EXPECT_EQ(num_draws(), 1);
}

TEST(DeviceBenchTest, TokensDrawnHereAndThere) {
  ISTHMUS_REQUIRE_DEVICE();
  SamplingBenchFlags flags;
  flags.rows = {1, 3};
  flags.vocabulary = 512;
  flags.threads = 2;
  flags.rounds = 1;
  const auto record = RunSamplingBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  ASSERT_EQ((*record)["results"].size(), 6u);
  for (const auto& result : (*record)["results"]) {
    ASSERT_EQ(result["paths"].size(), 2u);
    for (const auto& path : result["paths"]) EXPECT_EQ(path["tokens_alike"], result["rows"]);
    EXPECT_GT(result["draw_us"].get<double>(), 0.0);
  }
  flags.rows = {0};
  EXPECT_EQ(RunSamplingBench(flags).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DeviceBenchTest, AStepOfTwoRanks) {
  ISTHMUS_REQUIRE_DEVICE();
  StepBenchFlags flags = Miniature();
  flags.tp = 2;
  const auto record = RunStepBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectWhole(*record);
}

KernelBenchFlags MiniatureOperation(const std::string& operation) {
  KernelBenchFlags flags;
  flags.operation = operation;
  flags.shape = "miniature";
  flags.layers = 2;
  flags.context = 8;
  flags.rounds = 1;
  flags.replays = 3;
  flags.seconds = 0.01;
  return flags;
}

TEST(DeviceBenchTest, AnOperationAndItsPatches) {
  ISTHMUS_REQUIRE_DEVICE();
  KernelBenchFlags flags = MiniatureOperation("post_pre");
  const auto record = RunKernelBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  const auto& results = (*record)["operations"][0]["results"];
  ASSERT_GE(results.size(), 2u);
  EXPECT_EQ(results[0]["path"], "trusted");
  flags.operation = "all of them";
  EXPECT_EQ(RunKernelBench(flags).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DeviceBenchTest, StepsOfTheIndexerAlone) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const char* operation : {"indexer.scores", "indexer.selection"}) {
    KernelBenchFlags flags = MiniatureOperation(operation);
    flags.context = 200;  // 50 keys, of which 16 are selected.
    const auto record = RunKernelBench(flags);
    ASSERT_TRUE(record.ok()) << record.status();
    const auto& one = (*record)["operations"][0];
    EXPECT_EQ(one["results"].size(), 2u);
    EXPECT_EQ(one["operations"].get<int64_t>() > 0, one["operation"] == "indexer.scores");
  }
}

TEST(DeviceBenchTest, AnAllReduceOfTwoRanks) {
  ISTHMUS_REQUIRE_DEVICE();
  if (kernels::IsRealDevice() && kernels::NumDevices() < 2) GTEST_SKIP() << "needs two GPUs";
  AllReduceBenchFlags flags;
  flags.rows = {1, 3};
  flags.hidden = 64;
  flags.calls = 2;
  flags.rounds = 1;
  flags.replays = 2;
  const auto record = RunAllReduceBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  ASSERT_EQ((*record)["sizes"].size(), 4u);
  EXPECT_EQ((*record)["sizes"][3]["path"], "all_reduce.one_shot");
  EXPECT_EQ((*record)["sizes"][3]["bytes"], 384);
  flags.rows = {0};
  EXPECT_EQ(RunAllReduceBench(flags).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DeviceBenchTest, RowsOfAPrompt) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const char* operation : {"attention.csa", "linear.wq_b", "post_pre.bf16"}) {
    KernelBenchFlags flags = MiniatureOperation(operation);
    flags.rows = 3;
    flags.has_trusted = false;
    const auto record = RunKernelBench(flags);
    ASSERT_TRUE(record.ok()) << record.status();
    const auto& one = (*record)["operations"][0];
    ASSERT_GE(one["results"].size(), 1u) << operation;
    for (const auto& result : one["results"]) {
      EXPECT_NE(result["path"], "attention.split_mma");  // Of decode.
      EXPECT_NE(result["path"], "trusted");
    }
  }
}

}  // namespace
}  // namespace isthmus::diag
