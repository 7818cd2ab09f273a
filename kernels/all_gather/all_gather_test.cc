// SPDX-License-Identifier: Apache-2.0
// Every variant, with a thread per rank: on the CPU, and on a device or its emulation.
#include "kernels/all_gather/all_gather.h"

#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/all_gather/all_gather_variants.h"
#include "kernels/core/peer_group.h"
#include "kernels/testing/device.h"

namespace isthmus::kernels {
namespace {

using ::testing::HasSubstr;

// A kernel that is loaded at its first launch waits until the device is idle, and here the others
// wait for it: all are loaded before anything else.
const bool kLoadsEagerly = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0;

void RunRanks(PeerGroup& group, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < group.ranks(); ++rank) threads.emplace_back([&, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

struct Shape {
  int64_t rows, cols, stride;
};
// The first needs several pieces of a slot of 1 KB, the others leave ranks without rows.
constexpr Shape kShapes[] = {{101, 17, 20}, {5, 8, 8}, {1, 3, 3}, {16, 256, 256}};

int32_t ValueAt(int64_t t, int64_t d) { return static_cast<int32_t>(1000 * t + d); }

// What `rank` starts with: its own rows, and garbage elsewhere. Gaps between rows are -7.
std::vector<int32_t> Before(const Shape& s, int rank, int ranks) {
  std::vector<int32_t> out(static_cast<size_t>(s.rows * s.stride), -7);
  const RowRange own = RowsOf(s.rows, rank, ranks);
  for (int64_t t = 0; t < s.rows; ++t) {
    const bool is_own = t >= own.first && t < own.first + own.count;
    for (int64_t d = 0; d < s.cols; ++d) {
      out[static_cast<size_t>(t * s.stride + d)] = is_own ? ValueAt(t, d) : -1;
    }
  }
  return out;
}
std::vector<int32_t> After(const Shape& s) { return Before(s, 0, 1); }

std::unique_ptr<PeerGroup> MakeGroup(int ranks, const std::vector<int>& devices,
                                     absl::Duration timeout = absl::Seconds(20)) {
  auto group = PeerGroup::Create(
      {.ranks = ranks, .devices = devices, .slot_bytes = 1024, .timeout = timeout});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

TEST(AllGatherTest, OwnsEveryRowOnce) {
  for (const int ranks : {1, 2, 4, 8}) {
    for (const int64_t rows : {0, 1, 7, 8, 8192, 8191}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(RowsOf(rows, rank, ranks).first, next);
        next += RowsOf(rows, rank, ranks).count;
        EXPECT_LE(RowsOf(rows, 0, ranks).count - RowsOf(rows, rank, ranks).count, 1);
      }
      EXPECT_EQ(next, rows);
    }
  }
}

TEST(AllGatherTest, GivesEveryRankAllRowsOnTheCpu) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    const std::unique_ptr<PeerGroup> group = MakeGroup(ranks, {});
    for (const Shape& s : kShapes) {
      RunRanks(*group, [&](int rank) {
        std::vector<int32_t> values = Before(s, rank, ranks);
        Exec exec;
        exec.communicator = &group->communicator(rank);
        const absl::Status status =
            AllGather({{values.data(), DType::kI32, s.rows, s.cols, s.stride}}, exec);
        EXPECT_TRUE(status.ok()) << status;
        EXPECT_EQ(values, After(s)) << ranks << " ranks, " << s.rows << " rows";
      });
    }
  }
}

TEST(AllGatherTest, GivesEveryRankAllRowsOnADevice) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const int ranks : {2, 4, 8}) {
    std::vector<int> devices;
    for (int r = 0; r < ranks; ++r) devices.push_back(NumDevices() >= ranks ? r : 0);
    const std::unique_ptr<PeerGroup> group = MakeGroup(ranks, devices);
    for (const Shape& s : kShapes) {
      // All memory before the first rank starts: a free waits for the device.
      std::vector<std::unique_ptr<testing::TestDevice>> streams;
      std::vector<std::unique_ptr<testing::DeviceCopy<int32_t>>> values;
      for (int r = 0; r < ranks; ++r) {
        ASSERT_TRUE(UseDevice(devices[static_cast<size_t>(r)]).ok());
        streams.push_back(std::make_unique<testing::TestDevice>());
        values.push_back(std::make_unique<testing::DeviceCopy<int32_t>>(Before(s, r, ranks)));
      }
      RunRanks(*group, [&](int rank) {
        const auto r = static_cast<size_t>(rank);
        EXPECT_TRUE(UseDevice(devices[r]).ok());
        Exec exec = streams[r]->exec();
        exec.communicator = &group->communicator(rank);
        const absl::Status status =
            AllGather({{values[r]->data(), DType::kI32, s.rows, s.cols, s.stride}}, exec);
        EXPECT_TRUE(status.ok()) << status;
        streams[r]->Finish();
      });
      ASSERT_TRUE(UseDevice(0).ok());
      for (const auto& one : values) {
        EXPECT_EQ(one->ToHost(), After(s)) << ranks << " ranks, " << s.rows << " rows";
        EXPECT_TRUE(one->Intact());
      }
    }
    EXPECT_TRUE(group->Fault().ok());
  }
}

TEST(AllGatherTest, GivesUpOnARankThatNeverArrives) {
  const std::unique_ptr<PeerGroup> group = MakeGroup(2, {}, absl::Milliseconds(30));
  std::vector<int32_t> values(4);
  Exec exec;
  exec.communicator = &group->communicator(0);
  const absl::Status status = AllGather({{values.data(), DType::kI32, 2, 2, 2}}, exec);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 waited for rank 1"));
}

TEST(AllGatherTest, RefusesWhatBreaksItsContract) {
  const std::unique_ptr<PeerGroup> group = MakeGroup(2, {});
  std::vector<int32_t> values(600);
  Exec exec;
  exec.communicator = &group->communicator(0);
  const auto message = [&](const MatrixView& view) {
    const absl::Status status = AllGather({view}, exec);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(message({values.data(), DType::kBf16, 2, 2, 2}), HasSubstr("values have type 2"));
  EXPECT_THAT(message({values.data(), DType::kI32, 2, 4, 3}),
              HasSubstr("[2, 4] with row stride 3"));
  EXPECT_THAT(message({nullptr, DType::kI32, 2, 4, 4}), HasSubstr("no data"));
  EXPECT_THAT(message({values.data(), DType::kI32, 1, 300, 300}),
              HasSubstr("a row has 1200 bytes, a slot of the group 1024"));
}

}  // namespace
}  // namespace isthmus::kernels
