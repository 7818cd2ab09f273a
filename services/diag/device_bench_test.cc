// SPDX-License-Identifier: Apache-2.0
// The measurements of a GPU run to their end on a miniature, alone and with two ranks, and their
// records have what is read out of them. Times mean nothing in an emulator.
#include <gtest/gtest.h>

#include "kernels/testing/device.h"
#include "services/diag/kernel_bench.h"
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
  EXPECT_GT(record["operations"].size(), 20u);
}

TEST(DeviceBenchTest, AStepAlone) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto record = RunStepBench(Miniature());
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectWhole(*record);
}

TEST(DeviceBenchTest, AStepOfTwoRanks) {
  ISTHMUS_REQUIRE_DEVICE();
  StepBenchFlags flags = Miniature();
  flags.tp = 2;
  const auto record = RunStepBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  ExpectWhole(*record);
}

TEST(DeviceBenchTest, AnOperationAndItsPatches) {
  ISTHMUS_REQUIRE_DEVICE();
  KernelBenchFlags flags;
  flags.operation = "post_pre";
  flags.shape = "miniature";
  flags.layers = 2;
  flags.context = 8;
  flags.rounds = 1;
  flags.replays = 3;
  flags.seconds = 0.01;
  const auto record = RunKernelBench(flags);
  ASSERT_TRUE(record.ok()) << record.status();
  const auto& results = (*record)["operations"][0]["results"];
  ASSERT_GE(results.size(), 2u);
  EXPECT_EQ(results[0]["path"], "trusted");
  flags.operation = "all of them";
  EXPECT_EQ(RunKernelBench(flags).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace isthmus::diag
