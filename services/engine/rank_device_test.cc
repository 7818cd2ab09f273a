// SPDX-License-Identifier: Apache-2.0
// A model cut over two ranks on GPUs, decode steps as graphs, against the same two ranks as threads
// on the CPU: trusted paths add in one order, so that replies have the same logits, bit for bit.
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/peer_group.h"
#include "kernels/patches.h"
#include "kernels/testing/device.h"
#include "services/engine/engine.h"
#include "services/engine/rank_forward.h"
#include "services/model/device_context.h"
#include "services/model/device_weights.h"
#include "services/model/sharded_weights.h"

namespace isthmus::engine {
namespace {

using kernels::Arithmetic;

constexpr int kRanks = 2;
constexpr int kPageTokens = 128;

// Everything that two ranks are made of. `devices` empty: threads on the CPU.
class TwoRanks {
 public:
  TwoRanks(const model::Weights& whole, Arithmetic arithmetic, const std::vector<int>& devices) {
    group_ = kernels::PeerGroup::Create({.ranks = kRanks,
                                         .devices = devices,
                                         .slot_bytes = 1 << 18,
                                         .timeout = absl::Seconds(60)})
                 .value();
    std::vector<Rank> ranks(kRanks);
    for (size_t r = 0; r < kRanks; ++r) {
      const int number = static_cast<int>(r);
      const model::ShardPlan plan = model::PlanShard(whole.config(), number, kRanks).value();
      const int device = devices.empty() ? kv::kHostMemory : devices[r];
      model::ModelViews views;
      if (devices.empty()) {
        shares_.push_back(model::ShardedWeights::Create(&whole, plan).value());
        views = shares_.back()->views();
      } else {
        contexts_.push_back(model::DeviceContext::Open(device).value());
        uploads_.push_back(model::DeviceWeights::Upload(whole, &plan, nullptr).value());
        views = uploads_.back()->views();
        ranks[r].exec = contexts_.back()->exec();
        ranks[r].on_start = [device] { return kernels::UseDevice(device); };
      }
      forwards_.push_back(model::ModelForward::Create(views, arithmetic, kPageTokens).value());
      pools_.push_back(
          kv::CachePool::Create(forwards_.back()->layout(), 4 * kPageTokens, 4, device).value());
      ranks[r].forward = forwards_.back().get();
      ranks[r].vocabulary = plan.vocabulary;
      ranks[r].exec.communicator = &group_->communicator(number);
      ranks[r].exec.patches = &patches_;
    }
    ranks[1].caches = CopiesOf(*pools_[0], *pools_[1]);
    const kernels::Exec exec = ranks[0].exec;
    forward_ = std::make_unique<RankForward>(std::move(ranks), RealClock(), absl::Minutes(2),
                                             [](const absl::Status&) {});
    if (!devices.empty()) {
      EXPECT_TRUE(kernels::UseDevice(devices[0]).ok());
    }
    engine_ = std::make_unique<Engine>(forward_.get(), pools_[0].get(), EngineOptions{}, exec);
  }

  // Digests of the logits behind every token of greedy replies to prompts that run together.
  std::vector<std::vector<uint32_t>> Replies(const std::vector<std::vector<int32_t>>& prompts) {
    std::vector<Sequence> sequences;
    for (size_t i = 0; i < prompts.size(); ++i) {
      SamplingParams sampling;
      sampling.max_tokens = static_cast<int64_t>(4 + i);  // The last goes on alone.
      sampling.wants_logits_digests = true;
      sequences.push_back(engine_->Admit(absl::StrCat(i), prompts[i], sampling).value());
    }
    std::vector<std::vector<uint32_t>> digests(sequences.size());
    while (true) {
      std::vector<Sequence*> running;
      for (Sequence& sequence : sequences) {
        if (!sequence.is_finished()) running.push_back(&sequence);
      }
      if (running.empty()) break;
      const absl::Status status = engine_->Step(running);
      EXPECT_TRUE(status.ok()) << status;
      if (!status.ok()) break;
    }
    for (size_t i = 0; i < sequences.size(); ++i) digests[i] = sequences[i].logits_crc32c;
    return digests;
  }

 private:
  // The trusted paths, which have the bits of the CPU.
  const PatchSet patches_ = PatchSet::Resolve(kernels::AllPatches(), kernels::NoPatches()).value();
  std::unique_ptr<kernels::PeerGroup> group_;
  std::vector<std::unique_ptr<model::ShardedWeights>> shares_;
  std::vector<std::unique_ptr<model::DeviceContext>> contexts_;
  std::vector<std::unique_ptr<model::DeviceWeights>> uploads_;
  std::vector<std::unique_ptr<model::ModelForward>> forwards_;
  std::vector<std::unique_ptr<kv::CachePool>> pools_;
  std::unique_ptr<RankForward> forward_;
  std::unique_ptr<Engine> engine_;
};

class RankDeviceTest : public testing::TestWithParam<Arithmetic> {};

TEST_P(RankDeviceTest, RepliesAsRanksOnTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  // Two ranks of one real GPU would wait for each other whenever one of them frees memory.
  if (kernels::IsRealDevice() && kernels::NumDevices() < kRanks) GTEST_SKIP() << "needs two GPUs";
  model::WeightOptions options;
  options.residency = model::WeightOptions::kMapped;
  const auto whole =
      model::Weights::Load(ISTHMUS_SOURCE_DIR "/tests/golden/tiny-random-3layer/mxfp4", options)
          .value();
  const std::vector<int> devices =
      kernels::NumDevices() >= kRanks ? std::vector<int>{0, 1} : std::vector<int>{0, 0};
  const std::vector<std::vector<int32_t>> prompts = {{5, 17, 300}, {40, 41, 42, 43, 44, 45, 46}};
  TwoRanks on_host(*whole, GetParam(), {});
  TwoRanks on_device(*whole, GetParam(), devices);
  const auto expected = on_host.Replies(prompts);
  EXPECT_EQ(expected[1].size(), 5u);
  EXPECT_EQ(on_device.Replies(prompts), expected);
}

INSTANTIATE_TEST_SUITE_P(Arithmetics, RankDeviceTest,
                         testing::Values(Arithmetic::kMath, Arithmetic::kReference),
                         [](const testing::TestParamInfo<Arithmetic>& arithmetic) {
                           return arithmetic.param == Arithmetic::kMath ? "Math" : "Reference";
                         });

}  // namespace
}  // namespace isthmus::engine
