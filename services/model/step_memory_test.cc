// SPDX-License-Identifier: Apache-2.0
#include "services/model/step_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "kernels/core/workspace.h"
#include "services/base/thread_pool.h"
#include "services/model/flash_config.h"
#include "services/model/forward.h"
#include "services/model/testing/page_store.h"
#include "services/model/weights.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;

constexpr char kCheckpoint[] = ISTHMUS_SOURCE_DIR "/tests/golden/tiny-recall";

TEST(WeightBytesTest, AgreesWithTheSizesOfTheSpecification) {
  // Specification 6.1 and 6.3: 159.61 GB and 168.27 GB of files, 3.59 GB of which are draft stages.
  const ModelConfig flash = FlashConfig(43);
  EXPECT_NEAR(static_cast<double>(*WeightBytes(flash, WeightFormat::kMxfp4)), 156.02e9, 0.05e9);
  EXPECT_NEAR(static_cast<double>(*WeightBytes(flash, WeightFormat::kNvfp4)), 164.68e9, 0.05e9);
}

TEST(WeightBytesTest, GivesEachOfTwoRanksHalfAndWhatIsWhole) {
  const ModelConfig flash = FlashConfig(43);
  const int64_t whole = *WeightBytes(flash, WeightFormat::kNvfp4);
  const int64_t half = *WeightBytes(flash, WeightFormat::kNvfp4, 2);
  EXPECT_GT(half, whole / 2);
  EXPECT_LT(half, whole / 2 + whole / 50);
  EXPECT_NE(WeightBytes(flash, WeightFormat::kNvfp4, 3).status().message().find("3 ranks"),
            absl::string_view::npos);
}

TEST(WeightBytesTest, AgreesWithWhatLoadingHolds) {
  const auto weights = *Weights::Load(kCheckpoint, {});
  ASSERT_TRUE(weights->report().is_packed);
  const WeightFormat format = *StoredExpertFormat(kCheckpoint, weights->config());
  const auto held = static_cast<double>(weights->report().allocated_bytes);
  const auto planned = static_cast<double>(*WeightBytes(weights->config(), format));
  EXPECT_NEAR(held / planned, 1.0, 0.1);
}

TEST(ExpertFormatTest, IsKnownFromConfigAloneWhereThereAreNoShards) {
  const ModelConfig config = *LoadModelConfig(kCheckpoint);
  EXPECT_EQ(config.moe_quant_algo, "NVFP4");
  const std::string folder = testing::TempDir();
  EXPECT_EQ(*StoredExpertFormat(folder, config), WeightFormat::kNvfp4);
  EXPECT_EQ(*StoredExpertFormat(folder, FlashConfig(43)), WeightFormat::kMxfp4);
}

struct Case {
  const char* name;
  int64_t cached;  // Tokens of each sequence before the measured step.
  int64_t rows;    // New tokens of each sequence.
  int64_t sequences;
  kernels::Arithmetic arithmetic = kernels::Arithmetic::kReference;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class StepBytesTest : public testing::TestWithParam<Case> {};

// The bound holds and is no fantasy: at most a few times what was taken.
TEST_P(StepBytesTest, BoundsWhatAStepTakes) {
  const Case& c = GetParam();
  const auto weights = *Weights::Load(kCheckpoint, {});
  const auto forward = *ModelForward::Create(weights.get(), c.arithmetic, 256);
  ThreadPool threads(2);
  kernels::Workspace workspace;
  kernels::Exec exec;
  exec.threads = &threads;
  exec.workspace = &workspace;
  const int64_t end = c.cached + c.rows;
  std::vector<std::unique_ptr<PageStore>> stores;
  std::vector<kernels::SequenceKv> views;
  std::vector<int64_t> logit_rows;
  for (int64_t s = 0; s < c.sequences; ++s) {
    stores.push_back(std::make_unique<PageStore>(forward->layout(), end));
    // What lies in the pages does not matter: zeros are entries as well.
    views.push_back(stores.back()->View(s * c.rows, c.cached, c.rows));
    logit_rows.push_back((s + 1) * c.rows - 1);
  }
  const std::vector<int32_t> tokens(static_cast<size_t>(c.sequences * c.rows), 77);
  std::vector<float> logits(static_cast<size_t>(c.sequences * forward->vocab_size()));
  ASSERT_TRUE(
      forward
          ->Run({.tokens = tokens,
                 .sequences = views,
                 .logit_rows = logit_rows,
                 .logits = kernels::F32Matrix(logits.data(), c.sequences, forward->vocab_size())},
                exec)
          .ok());
  const auto taken = static_cast<int64_t>(workspace.capacity_bytes());
  const int64_t bound = StepBytes(
      weights->config(),
      {.rows = c.sequences * c.rows, .sequences = c.sequences, .max_tokens = end, .threads = 2});
  EXPECT_LE(taken, bound);
  EXPECT_GE(taken, bound / 8);
  RecordProperty("taken", std::to_string(taken));
  RecordProperty("bound", std::to_string(bound));
}

INSTANTIATE_TEST_SUITE_P(
    Steps, StepBytesTest,
    testing::Values(Case{"one token", 0, 1, 1}, Case{"a chunk", 0, 512, 1},
                    Case{"a chunk of a long prompt", 40000, 512, 1}, Case{"replies", 1000, 1, 32},
                    Case{"long replies", 40000, 1, 4}, Case{"some prompts", 0, 128, 4},
                    Case{"a chunk in math", 5000, 256, 1, kernels::Arithmetic::kMath}),
    [](const auto& step) {
      std::string name = step.param.name;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

}  // namespace
}  // namespace isthmus::model
