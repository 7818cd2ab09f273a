// SPDX-License-Identifier: Apache-2.0
#include "services/model/step_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/core/workspace.h"
#include "services/base/thread_pool.h"
#include "services/model/flash_config.h"
#include "services/model/forward.h"
#include "services/model/testing/page_store.h"
#include "services/model/weights.h"

namespace isthmus::model {
namespace {

using kernels::WeightFormat;
using kernels::Arithmetic::kMath;
using kernels::Arithmetic::kReference;

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
  kernels::Arithmetic arithmetic = kReference;
  // Of what is planned, that is taken. Less than nearly all only where a step of that size, cut
  // into other sequences or at another position, takes more.
  double least = 0.99;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// One step on the bundled model: what its workspace held at most.
class StepScratchTest : public testing::TestWithParam<Case> {
 protected:
  StepScratchTest()
      : weights_(*Weights::Load(kCheckpoint, {})),
        forward_(*ModelForward::Create(weights_.get(), GetParam().arithmetic, 256)) {}

  int64_t Take(int64_t cached, int64_t rows, int64_t sequences, int threads) {
    ThreadPool pool(threads);
    kernels::Workspace workspace;
    kernels::Exec exec;
    exec.threads = &pool;
    exec.workspace = &workspace;
    std::vector<std::unique_ptr<PageStore>> stores;
    std::vector<kernels::SequenceKv> views;
    std::vector<int64_t> logit_rows;
    for (int64_t s = 0; s < sequences; ++s) {
      stores.push_back(std::make_unique<PageStore>(forward_->layout(), cached + rows));
      // What lies in the pages does not matter, and what comes of it neither.
      views.push_back(stores.back()->View(s * rows, cached, rows));
      logit_rows.push_back((s + 1) * rows - 1);
    }
    const std::vector<int32_t> tokens(static_cast<size_t>(sequences * rows), 77);
    const int64_t vocab = forward_->vocab_size();
    std::vector<float> logits(static_cast<size_t>(sequences * vocab));
    const absl::Status status =
        forward_->Run({.tokens = tokens,
                       .sequences = views,
                       .logit_rows = logit_rows,
                       .logits = kernels::F32Matrix(logits.data(), sequences, vocab)},
                      exec);
    EXPECT_TRUE(status.ok()) << status;
    return workspace.peak_bytes();
  }

  const std::unique_ptr<Weights> weights_;
  const std::unique_ptr<ModelForward> forward_;
};

TEST_P(StepScratchTest, IsWhatAStepOfThatSizeTakes) {
  const Case& c = GetParam();
  for (const int threads : {1, 2, 5}) {
    const int64_t taken = Take(c.cached, c.rows, c.sequences, threads);
    const int64_t planned = StepScratchBytes(weights_->config(), {.rows = c.sequences * c.rows,
                                                                  .sequences = c.sequences,
                                                                  .logit_rows = c.sequences,
                                                                  .max_tokens = c.cached + c.rows,
                                                                  .threads = threads,
                                                                  .arithmetic = c.arithmetic});
    EXPECT_LE(taken, planned) << threads << " threads";
    EXPECT_GE(static_cast<double>(taken), c.least * static_cast<double>(planned)) << threads;
    RecordProperty(absl::StrCat("taken_", threads), std::to_string(taken));
    RecordProperty(absl::StrCat("planned_", threads), std::to_string(planned));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Steps, StepScratchTest,
    testing::Values(Case{"one token", 0, 1, 1}, Case{"a chunk", 0, 512, 1},
                    Case{"a chunk of a long prompt", 40000, 512, 1},
                    Case{"a long reply", 40000, 1, 1}, Case{"some prompts", 0, 128, 4},
                    Case{"a chunk that shares what it selects", 8064, 128, 1},
                    Case{"a few tokens of a long prompt", 40000, 64, 1, kReference, 0.7},
                    Case{"short chunks", 508, 4, 8, kReference, 0.7},
                    Case{"prompts that go on", 2000, 40, 3, kReference, 0.8},
                    Case{"replies", 1000, 1, 32, kReference, 0.3},
                    Case{"long replies", 40000, 1, 4, kReference, 0.5},
                    Case{"a chunk in math", 5000, 256, 1, kMath},
                    Case{"replies in math", 5000, 1, 40, kMath}),
    [](const auto& step) {
      std::string name = step.param.name;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

}  // namespace
}  // namespace isthmus::model
