// SPDX-License-Identifier: Apache-2.0
// A model cut over two ranks computes what the whole one does: logits within rounding, and the same
// choice of entries and experts, bit for bit, on every rank. Ranks are threads on the CPU.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kernels/core/peer_group.h"
#include "kernels/testing/compare.h"
#include "services/model/forward.h"
#include "services/model/sharded_weights.h"
#include "services/model/testing/page_store.h"

namespace isthmus::model {
namespace {

using kernels::Arithmetic;

constexpr int kRanks = 2;
constexpr int kPageTokens = 128;
constexpr int64_t kPrompt = 300;
constexpr int64_t kTokens = 303;  // Three decode steps.

std::unique_ptr<Weights> MappedWeights(const std::string& name) {
  WeightOptions options;
  options.residency = WeightOptions::kMapped;
  auto weights = Weights::Load(absl::StrCat(ISTHMUS_SOURCE_DIR, "/tests/golden/", name), options);
  EXPECT_TRUE(weights.ok()) << weights.status();
  return *std::move(weights);
}

std::vector<int32_t> Tokens(int64_t vocab) {
  std::vector<int32_t> tokens;
  for (int64_t t = 0; t < kTokens; ++t) {
    tokens.push_back(static_cast<int32_t>((t * 977 + 131) % (vocab - 20)) + 9);
  }
  return tokens;
}

// What a run leaves: logits of the last token of every step, and what was chosen on the way.
struct Record {
  std::vector<float> logits;                   // [steps, columns]
  std::map<std::string, std::string> choices;  // Bytes, by step, layer and name.
};

Record RunModel(const ModelViews& views, Arithmetic arithmetic, const kernels::Exec& exec) {
  auto forward = ModelForward::Create(views, arithmetic, kPageTokens);
  EXPECT_TRUE(forward.ok()) << forward.status();
  const std::vector<int32_t> tokens = Tokens((*forward)->vocab_size());
  PageStore store((*forward)->layout(), kTokens);
  Record record;
  int64_t at = 0;
  while (at < kTokens) {
    const int64_t size = at == 0 ? kPrompt : 1;
    Tap tap;
    tap.on_tensor = [&](const TapTensor& tensor) {
      if (tensor.name != "topk" && tensor.name != "router_ids") return;
      size_t count = 4;
      for (const int64_t dim : tensor.shape) count *= static_cast<size_t>(dim);
      record.choices[absl::StrCat(at, ".", tensor.layer, ".", tensor.name)] =
          std::string(static_cast<const char*>(tensor.values), count);
    };
    const kernels::SequenceKv view = store.View(0, at, size);
    const int64_t row = size - 1;
    std::vector<float> logits(static_cast<size_t>(views.head.rows));
    const absl::Status status = (*forward)->Run(
        {.tokens = std::span(tokens).subspan(static_cast<size_t>(at), static_cast<size_t>(size)),
         .sequences = {&view, 1},
         .logit_rows = {&row, 1},
         .logits = kernels::F32Matrix(logits.data(), 1, views.head.rows),
         .tap = &tap},
        exec);
    EXPECT_TRUE(status.ok()) << status;
    record.logits.insert(record.logits.end(), logits.begin(), logits.end());
    at += size;
  }
  return record;
}

// The logits of the ranks beside each other.
std::vector<float> Gathered(const std::vector<Record>& records) {
  const size_t steps = 1 + kTokens - kPrompt;
  const size_t columns = records[0].logits.size() / steps;
  std::vector<float> out;
  for (size_t step = 0; step < steps; ++step) {
    for (const Record& record : records) {
      const auto begin = record.logits.begin() + static_cast<ptrdiff_t>(step * columns);
      out.insert(out.end(), begin, begin + static_cast<ptrdiff_t>(columns));
    }
  }
  return out;
}

std::vector<Record> RunRanks(const Weights& whole, Arithmetic arithmetic) {
  auto group = kernels::PeerGroup::Create(
      {.ranks = kRanks, .devices = {}, .slot_bytes = 1 << 16, .timeout = absl::Seconds(60)});
  EXPECT_TRUE(group.ok()) << group.status();
  std::vector<Record> records(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto share = ShardedWeights::Create(&whole, *PlanShard(whole.config(), rank, kRanks));
      ASSERT_TRUE(share.ok()) << share.status();
      kernels::Exec exec;
      exec.communicator = &(*group)->communicator(rank);
      records[static_cast<size_t>(rank)] = RunModel((*share)->views(), arithmetic, exec);
    });
  }
  for (std::thread& thread : threads) thread.join();
  return records;
}

class RanksTest : public testing::TestWithParam<const char*> {};

TEST_P(RanksTest, GiveTheLogitsOfTheWholeInMathArithmetic) {
  const std::unique_ptr<Weights> whole = MappedWeights(GetParam());
  const Record expected = RunModel(whole->views(), Arithmetic::kMath, {});
  const std::vector<Record> records = RunRanks(*whole, Arithmetic::kMath);
  EXPECT_TRUE(kernels::testing::WithinRelativeL2(Gathered(records), expected.logits, 1e-4));
  EXPECT_FALSE(expected.choices.empty());
  EXPECT_EQ(records[0].choices, records[1].choices);
}

// A cut of these small models lies inside a group of activations that is quantised together, so
// each rank scales its part by its own largest value, and parts are rounded before they are added:
// other bits than the whole model's, but no worse ones. Math arithmetic is the measure.
TEST_P(RanksTest, AreAsCloseToMathAsTheWholeInReferenceArithmetic) {
  const std::unique_ptr<Weights> whole = MappedWeights(GetParam());
  const Record exact = RunModel(whole->views(), Arithmetic::kMath, {});
  const Record expected = RunModel(whole->views(), Arithmetic::kReference, {});
  const std::vector<Record> records = RunRanks(*whole, Arithmetic::kReference);
  EXPECT_TRUE(kernels::testing::WithinBound(Gathered(records), expected.logits, exact.logits));
  EXPECT_EQ(records[0].choices, records[1].choices);
}

TEST_P(RanksTest, RepeatBitByBit) {
  const std::unique_ptr<Weights> whole = MappedWeights(GetParam());
  const std::vector<Record> first = RunRanks(*whole, Arithmetic::kReference);
  const std::vector<Record> second = RunRanks(*whole, Arithmetic::kReference);
  EXPECT_TRUE(kernels::testing::SameBits(Gathered(first), Gathered(second)));
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, RanksTest,
                         testing::Values("tiny-recall", "tiny-random-3layer/mxfp4",
                                         "tiny-random-3layer/nvfp4-cast"),
                         [](const testing::TestParamInfo<const char*>& checkpoint) {
                           std::string name = checkpoint.param;
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

}  // namespace
}  // namespace isthmus::model
