// SPDX-License-Identifier: Apache-2.0
// The contract and the CPU path: ranks are threads.
#include "kernels/all_reduce/all_reduce.h"

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/all_reduce/nccl_group.h"
#include "kernels/core/formats.h"
#include "kernels/core/peer_group.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/inputs.h"
#include "services/base/fault.h"

namespace isthmus::kernels {
namespace {

using ::testing::HasSubstr;

std::unique_ptr<PeerGroup> HostGroup(int ranks, int64_t slot_bytes = 4096,
                                     absl::Duration timeout = absl::Seconds(20)) {
  absl::StatusOr<std::unique_ptr<PeerGroup>> group = PeerGroup::Create(
      {.ranks = ranks, .devices = {}, .slot_bytes = slot_bytes, .timeout = timeout});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

// body(rank, exec) on a thread per rank.
void RunRanks(PeerGroup& group, const std::function<void(int, const Exec&)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      Exec exec;
      exec.communicator = &group.communicator(rank);
      body(rank, exec);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

std::vector<std::vector<float>> Inputs(int ranks, int64_t count, uint64_t seed = 1) {
  std::vector<std::vector<float>> out;
  for (int rank = 0; rank < ranks; ++rank) {
    out.push_back(testing::OutlierValues(seed + static_cast<uint64_t>(rank), count));
  }
  return out;
}

// The stated order in scalar code.
std::vector<float> Expected(const std::vector<std::vector<float>>& inputs, DType wire, bool round) {
  std::vector<float> out(inputs[0].size());
  for (size_t i = 0; i < out.size(); ++i) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      const float x =
          wire == DType::kBf16 && inputs.size() > 1 ? RoundBf16(inputs[r][i]) : inputs[r][i];
      out[i] = r == 0 ? x : out[i] + x;
    }
    if (round) out[i] = RoundBf16(out[i]);
  }
  return out;
}

TEST(AllReduceTest, AddsUpAValueComputedByHand) {
  const std::unique_ptr<PeerGroup> group = HostGroup(2);
  std::vector<std::vector<float>> x = {{1.0f, 2.0f, 0x1p-8f}, {4.0f, -2.0f, 1.0f}};
  RunRanks(*group, [&](int rank, const Exec& exec) {
    const MatrixView view = F32Matrix(x[static_cast<size_t>(rank)].data(), 1, 3);
    ASSERT_TRUE(AllReduce({.x = view, .out = view, .round_output = true}, exec).ok());
  });
  const std::vector<float> expected = {5.0f, 0.0f, 1.0f};  // 1 + 2^-8 is a tie in bf16.
  EXPECT_EQ(x[0], expected);
  EXPECT_EQ(x[1], expected);
}

TEST(AllReduceTest, GivesEveryRankTheBitsOfTheStatedOrder) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const std::unique_ptr<PeerGroup> group = HostGroup(ranks);
    for (const DType wire : {DType::kF32, DType::kBf16}) {
      for (const bool round : {false, true}) {
        // 200 x 37 in f32 takes 8 slots.
        for (const auto& [rows, cols] : {std::pair{1, 1}, {3, 16}, {200, 37}}) {
          std::vector<std::vector<float>> x = Inputs(ranks, rows * cols);
          const std::vector<float> expected = Expected(x, wire, round);
          std::vector<std::vector<float>> out(x.size(), std::vector<float>(x[0].size()));
          RunRanks(*group, [&](int rank, const Exec& exec) {
            const auto r = static_cast<size_t>(rank);
            const absl::Status status = AllReduce({.x = F32Matrix(x[r].data(), rows, cols),
                                                   .out = F32Matrix(out[r].data(), rows, cols),
                                                   .wire = wire,
                                                   .round_output = round},
                                                  exec);
            EXPECT_TRUE(status.ok()) << status;
          });
          for (const auto& one : out) EXPECT_TRUE(testing::SameBits(one, expected)) << ranks;
        }
      }
    }
  }
}

TEST(AllReduceTest, StaysWithinItsBoundOfTheDefinition) {
  constexpr int kRanks = 8;
  constexpr int64_t kRows = 5, kCols = 64;
  std::vector<std::vector<float>> x = Inputs(kRanks, kRows * kCols, 7);
  const std::vector<float> naive = Expected(x, DType::kF32, false);
  std::vector<AllReduceArgs> all;
  std::vector<float> exact(x[0].size());
  for (auto& one : x) {
    all.push_back(
        {.x = F32Matrix(one.data(), kRows, kCols), .out = F32Matrix(exact.data(), kRows, kCols)});
  }
  ASSERT_TRUE(AllReduceDefinition(all).ok());
  EXPECT_TRUE(testing::WithinRelativeL2(naive, exact, 1e-6));
}

TEST(AllReduceTest, TakesRowsThatLieApartAndLeavesTheGapsAlone) {
  const std::unique_ptr<PeerGroup> group = HostGroup(2);
  std::vector<std::vector<float>> x(2, std::vector<float>(30, 1.5f));
  std::vector<std::vector<float>> out(2, std::vector<float>(36, -7.0f));
  RunRanks(*group, [&](int rank, const Exec& exec) {
    const auto r = static_cast<size_t>(rank);
    ASSERT_TRUE(AllReduce({.x = {x[r].data(), DType::kF32, 3, 8, 10},
                           .out = {out[r].data(), DType::kF32, 3, 8, 12}},
                          exec)
                    .ok());
  });
  for (const auto& one : out) {
    for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(one[i], i % 12 < 8 ? 3.0f : -7.0f) << i;
  }
}

TEST(AllReduceTest, GoesOnThroughManyCallsInBothSlots) {
  constexpr int kRanks = 4;
  const std::unique_ptr<PeerGroup> group = HostGroup(kRanks);
  RunRanks(*group, [&](int rank, const Exec& exec) {
    for (int call = 0; call < 500; ++call) {
      std::vector<float> x(16, static_cast<float>(rank + call));
      const MatrixView view = F32Matrix(x.data(), 2, 8);
      ASSERT_TRUE(AllReduce({.x = view, .out = view}, exec).ok());
      ASSERT_EQ(x[0], static_cast<float>(6 + 4 * call));
      ASSERT_EQ(x[15], x[0]);
    }
  });
}

TEST(AllReduceTest, GivesUpOnARankThatNeverArrivesAndNamesIt) {
  const std::unique_ptr<PeerGroup> group = HostGroup(3, 4096, absl::Milliseconds(50));
  EXPECT_TRUE(group->Fault().ok());
  RunRanks(*group, [&](int rank, const Exec& exec) {
    if (rank == 1) return;
    std::vector<float> x(8, 1.0f);
    const MatrixView view = F32Matrix(x.data(), 1, 8);
    const absl::Status status = AllReduce({.x = view, .out = view}, exec);
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(status.message()), HasSubstr("waited for rank 1"));
    EXPECT_EQ(FaultScopeOf(status), FaultScope::kDevice);
  });
  EXPECT_THAT(std::string(group->Fault().message()), HasSubstr("waited for rank 1"));
}

TEST(AllReduceTest, DoesNothingForOneRankInPlace) {
  std::vector<float> x = {1.0f, 0x1.01p0f};
  const MatrixView view = F32Matrix(x.data(), 1, 2);
  ASSERT_TRUE(AllReduce({.x = view, .out = view, .wire = DType::kBf16}, Exec{}).ok());
  EXPECT_EQ(x[1], 0x1.01p0f);  // Nothing travels, so nothing is rounded for the wire.
  ASSERT_TRUE(AllReduce({.x = view, .out = view, .round_output = true}, Exec{}).ok());
  EXPECT_EQ(x[1], 1.0f);
}

void ExpectRefused(const AllReduceArgs& args, const Communicator& group, const char* what) {
  const absl::Status status = ValidateAllReduce(args, group);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
  EXPECT_THAT(std::string(status.message()), HasSubstr(what));
}

TEST(AllReduceTest, RefusesWhatBreaksItsContract) {
  const std::unique_ptr<PeerGroup> group = HostGroup(2, 256);
  const Communicator& two = group->communicator(1);
  std::vector<float> x(200);
  const AllReduceArgs good = {.x = F32Matrix(x.data(), 2, 32), .out = F32Matrix(x.data(), 2, 32)};
  EXPECT_TRUE(ValidateAllReduce(good, two).ok());
  AllReduceArgs args = good;
  args.out.cols = 31;
  ExpectRefused(args, two, "out is [2, 31] with row stride 32, x is [2, 32]");
  args = good;
  args.x.dtype = DType::kBf16;
  ExpectRefused(args, two, "x has type 2");
  args = good;
  args.wire = DType::kFp8E4m3;
  ExpectRefused(args, two, "wire has type 3");
  args = good;
  args.x.data = nullptr;
  ExpectRefused(args, two, "x [2, 32] has no data");
  args.x = args.out = F32Matrix(x.data(), 1, 100);
  ExpectRefused(args, two, "400 bytes on the wire, a slot of the group 256");
  Communicator nine = two;
  nine.ranks = 9;
  ExpectRefused(good, nine, "rank 1 of 9, at most 8");
}

TEST(PeerGroupTest, RefusesWhatItCannotMake) {
  EXPECT_EQ(PeerGroup::Create({.ranks = 9, .devices = {}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerGroup::Create({.ranks = 2, .devices = {0}}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PeerGroup::Create({.ranks = 2, .devices = {}, .slot_bytes = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(NcclGroupTest, SaysWhenItIsNotBuiltIn) {
  if (NcclGroup::IsBuiltIn()) GTEST_SKIP() << "built with NCCL";
  EXPECT_EQ(NcclGroup::Create({0, 1}).status().code(), absl::StatusCode::kUnimplemented);
}

TEST(OneShotTest, TakesWhatFitsASlotInWholeVectors) {
  const std::unique_ptr<PeerGroup> group = HostGroup(2, 4096);
  alignas(16) float x[4096] = {};
  AllReduceArgs args = {.x = F32Matrix(x, 2, 512), .out = F32Matrix(x, 2, 512)};
  EXPECT_TRUE(FitsOneShot({args, group->communicator(0)}));
  args.x.rows = args.out.rows = 3;
  EXPECT_FALSE(FitsOneShot({args, group->communicator(0)}));
  args.wire = DType::kBf16;  // Half the bytes.
  EXPECT_TRUE(FitsOneShot({args, group->communicator(0)}));
  args.x.cols = args.out.cols = 508;
  EXPECT_FALSE(FitsOneShot({args, group->communicator(0)}));
  args = {.x = F32Matrix(x + 1, 1, 512), .out = F32Matrix(x, 1, 512)};
  EXPECT_FALSE(FitsOneShot({args, group->communicator(0)}));
  EXPECT_EQ(OneShotBlocks(1), 1);
  EXPECT_EQ(OneShotBlocks(512), 1);
  EXPECT_EQ(OneShotBlocks(513), 2);
  EXPECT_EQ(OneShotBlocks(1 << 20), 32);
}

}  // namespace
}  // namespace isthmus::kernels
