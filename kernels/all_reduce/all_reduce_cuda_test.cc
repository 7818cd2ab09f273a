// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant, with a thread and a stream per rank: several ranks on one device, and one
// rank per device where there are two.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/all_reduce/all_reduce.h"
#include "kernels/all_reduce/all_reduce_variants.h"
#include "kernels/all_reduce/nccl_group.h"
#include "kernels/core/formats.h"
#include "kernels/core/peer_group.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using testing::DeviceCopy;

// Kernels of several ranks on one device wait for each other, so none may wait for the device to be
// idle, as a kernel does that is loaded at its first launch, nor for one of another rank, as
// streams do that share one of the device's queues (8 unless told).
const bool kIsSetUp = setenv("CUDA_MODULE_LOADING", "EAGER", 1) == 0 &&
                      setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1) == 0;

struct Shape {
  int64_t rows, cols, x_stride, out_stride;
};

// What one rank owns. Everything is allocated before any rank starts and freed after the last has
// ended: a free waits for the device, and so for peers that wait for this rank.
struct Rank {
  Rank(int device, const Shape& s, const std::vector<float>& values) {
    EXPECT_TRUE(UseDevice(device).ok());
    test_device = std::make_unique<testing::TestDevice>(kPhaseDecode);
    std::vector<float> strided(static_cast<size_t>(s.rows * s.x_stride), NAN);
    for (int64_t t = 0; t < s.rows; ++t) {
      std::memcpy(strided.data() + t * s.x_stride, values.data() + t * s.cols,
                  sizeof(float) * static_cast<size_t>(s.cols));
    }
    x = std::make_unique<DeviceCopy<float>>(strided);
    out = std::make_unique<DeviceCopy<float>>(s.rows * s.out_stride);
  }

  AllReduceArgs Args(const Shape& s, DType wire, bool round) const {
    return {.x = {x->data(), DType::kF32, s.rows, s.cols, s.x_stride},
            .out = {out->data(), DType::kF32, s.rows, s.cols, s.out_stride},
            .wire = wire,
            .round_output = round};
  }
  std::vector<float> Result(const Shape& s) const {
    const std::vector<float> strided = out->ToHost();
    std::vector<float> packed;
    for (int64_t t = 0; t < s.rows; ++t) {
      const auto begin = strided.begin() + t * s.out_stride;
      packed.insert(packed.end(), begin, begin + s.cols);
    }
    return packed;
  }

  std::unique_ptr<testing::TestDevice> test_device;
  std::unique_ptr<DeviceCopy<float>> x;
  std::unique_ptr<DeviceCopy<float>> out;
};

std::vector<std::vector<float>> Inputs(int ranks, int64_t count, uint64_t seed) {
  std::vector<std::vector<float>> out;
  for (int rank = 0; rank < ranks; ++rank) {
    out.push_back(testing::OutlierValues(seed + static_cast<uint64_t>(rank), count));
  }
  return out;
}

// The stated order: what all variants but NCCL give, bit for bit.
std::vector<float> Naive(const std::vector<std::vector<float>>& inputs, DType wire, bool round) {
  std::vector<float> out(inputs[0].size());
  for (size_t i = 0; i < out.size(); ++i) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      const float x = wire == DType::kBf16 ? RoundBf16(inputs[r][i]) : inputs[r][i];
      out[i] = r == 0 ? x : out[i] + x;
    }
    if (round) out[i] = RoundBf16(out[i]);
  }
  return out;
}

// body(rank) on a thread per rank, on the rank's device.
void RunRanks(const std::vector<int>& devices, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < devices.size(); ++rank) {
    threads.emplace_back([&, rank] {
      EXPECT_TRUE(UseDevice(devices[rank]).ok());
      body(static_cast<int>(rank));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(UseDevice(0).ok());
}

// Rank r on device r where there are enough, else all on the first.
std::vector<int> DevicesFor(int ranks) {
  std::vector<int> devices;
  for (int rank = 0; rank < ranks; ++rank) {
    devices.push_back(NumDevices() >= ranks ? rank : 0);
  }
  return devices;
}

std::unique_ptr<PeerGroup> MakeGroup(const std::vector<int>& devices, int64_t slot_bytes,
                                     absl::Duration timeout = absl::Seconds(20)) {
  absl::StatusOr<std::unique_ptr<PeerGroup>> group =
      PeerGroup::Create({.ranks = static_cast<int>(devices.size()),
                         .devices = devices,
                         .slot_bytes = slot_bytes,
                         .timeout = timeout});
  EXPECT_TRUE(group.ok()) << group.status();
  return *std::move(group);
}

class AllReduceVariantTest : public ::testing::TestWithParam<size_t> {
 protected:
  const AllReduceVariant& variant() const { return AllReduceVariants()[GetParam()]; }
  bool is_nccl() const { return variant().launch == LaunchAllReduceNccl; }
  // A GPU promises to run no kernel of one stream beside one of another. One kernel a rank is seen
  // to run beside the others' (one_shot); of several in turn some wait for ranks behind them.
  bool NeedsADeviceEach() const {
    return IsRealDevice() && !is_nccl() && variant().patch == nullptr;
  }
  void SetUp() override {
    if (NeedsADeviceEach() && NumDevices() < 2) GTEST_SKIP() << "needs two GPUs";
  }

  // One case on all ranks, twice; NCCL's order is its own and is held to the bound.
  void Check(const std::vector<int>& devices, PeerGroup& group, const Shape& s, DType wire,
             bool round) {
    const auto ranks = static_cast<int>(devices.size());
    if (NeedsADeviceEach() && NumDevices() < ranks) return;
    const auto inputs = Inputs(ranks, s.rows * s.cols, 11);
    std::vector<std::unique_ptr<Rank>> all;
    for (int r = 0; r < ranks; ++r) {
      all.push_back(std::make_unique<Rank>(devices[static_cast<size_t>(r)], s,
                                           inputs[static_cast<size_t>(r)]));
    }
    const AllReduceArgs shape_only = all[0]->Args(s, wire, round);
    const AllReduceCall first = {shape_only, group.communicator(0)};
    if (variant().supports != nullptr && !variant().supports(first)) return;
    ++checked_;
    const std::vector<float> naive = Naive(inputs, wire, round);
    for (int run = 0; run < 2; ++run) {
      RunRanks(devices, [&](int r) {
        Rank& own = *all[static_cast<size_t>(r)];
        const AllReduceArgs args = own.Args(s, wire, round);
        const AllReduceCall call = {args, group.communicator(r)};
        const absl::Status status = variant().launch(call, own.test_device->exec());
        EXPECT_TRUE(status.ok()) << status;
        own.test_device->Finish();
      });
      for (const auto& own : all) {
        const std::vector<float> result = own->Result(s);
        if (is_nccl()) {
          EXPECT_TRUE(testing::WithinRelativeL2(result, naive, 1e-2));
          EXPECT_TRUE(testing::SameBits(result, all[0]->Result(s)));
        } else {
          EXPECT_TRUE(testing::SameBits(result, naive)) << ranks << " ranks, " << s.rows << " rows";
        }
        EXPECT_TRUE(own->x->Intact());
        EXPECT_TRUE(own->out->Intact());
      }
    }
    EXPECT_TRUE(group.Fault().ok()) << group.Fault();
  }

  int checked_ = 0;
};

std::vector<size_t> CudaVariants() {
  std::vector<size_t> out;
  for (size_t i = 0; i < AllReduceVariants().size(); ++i) {
    const AllReduceVariant& variant = AllReduceVariants()[i];
    if (variant.arches.begin != kArchCpu && variant.launch != nullptr) out.push_back(i);
  }
  return out;
}

TEST_P(AllReduceVariantTest, GivesEveryRankTheBitsOfTheStatedOrder) {
  ISTHMUS_REQUIRE_DEVICE();
  const Shape shapes[] = {{1, 8, 8, 8},       {1, 4096, 4096, 4096}, {3, 40, 40, 48},
                          {5, 72, 80, 72},    {33, 128, 128, 128},   {7, 13, 13, 13},
                          {64, 256, 260, 256}};
  for (const int ranks : {2, 4, 8}) {
    const std::vector<int> devices = DevicesFor(ranks);
    const std::unique_ptr<PeerGroup> group = MakeGroup(devices, 1 << 16);
    std::unique_ptr<NcclGroup> nccl;
    if (is_nccl()) {
      if (NumDevices() < ranks) continue;
      nccl = *NcclGroup::Create(devices);
      for (int r = 0; r < ranks; ++r) group->communicator(r).nccl = nccl->handle(r);
    }
    for (const Shape& s : shapes) {
      for (const DType wire : {DType::kF32, DType::kBf16}) {
        for (const bool round : {false, true}) Check(devices, *group, s, wire, round);
      }
    }
  }
  if (checked_ == 0) GTEST_SKIP() << "needs two GPUs";
}

TEST_P(AllReduceVariantTest, GoesInPiecesWhereASlotIsSmall) {
  ISTHMUS_REQUIRE_DEVICE();
  if (variant().launch != LaunchAllReducePeers) return;  // The others take one slot, or none.
  const std::vector<int> devices = DevicesFor(2);
  const std::unique_ptr<PeerGroup> group = MakeGroup(devices, 1024);
  Check(devices, *group, {30, 64, 64, 64}, DType::kF32, false);  // Eight pieces.
  Check(devices, *group, {9, 200, 200, 201}, DType::kF32, true);
}

// A graph replayed against the same buffers: calls are counted in device memory.
TEST_P(AllReduceVariantTest, GoesOnWhenAGraphIsReplayed) {
  ISTHMUS_REQUIRE_DEVICE();
  constexpr int kRanks = 2;
  constexpr int kReplays = 7;
  const Shape s = {2, 64, 64, 64};
  const std::vector<int> devices = DevicesFor(kRanks);
  if (is_nccl() && NumDevices() < kRanks) GTEST_SKIP() << "needs two GPUs";
  const std::unique_ptr<PeerGroup> group = MakeGroup(devices, 4096);
  std::unique_ptr<NcclGroup> nccl;
  if (is_nccl()) {
    nccl = *NcclGroup::Create(devices);
    for (int r = 0; r < kRanks; ++r) group->communicator(r).nccl = nccl->handle(r);
  }
  std::vector<std::unique_ptr<Rank>> all;
  for (int r = 0; r < kRanks; ++r) {
    all.push_back(std::make_unique<Rank>(devices[static_cast<size_t>(r)], s,
                                         std::vector<float>(128, static_cast<float>(r + 1))));
  }
  RunRanks(devices, [&](int r) {
    Rank& own = *all[static_cast<size_t>(r)];
    AllReduceArgs args = own.Args(s, DType::kF32, false);
    args.out = args.x;  // In place: each replay doubles the sum.
    const AllReduceCall call = {args, group->communicator(r)};
    const Exec& exec = own.test_device->exec();
    // NCCL wants a first call outside a graph.
    if (is_nccl()) {
      ASSERT_TRUE(variant().launch(call, exec).ok());
    }
    ASSERT_TRUE(DeviceGraph::BeginCapture(exec.stream).ok());
    const absl::Status twice[] = {variant().launch(call, exec), variant().launch(call, exec)};
    absl::StatusOr<DeviceGraph> graph = DeviceGraph::EndCapture(exec.stream);
    ASSERT_TRUE(twice[0].ok() && twice[1].ok() && graph.ok()) << graph.status();
    for (int i = 0; i < kReplays; ++i) ASSERT_TRUE(graph->Replay(exec.stream).ok());
    own.test_device->Finish();
  });
  const float calls = 2 * kReplays + (is_nccl() ? 1 : 0);
  const float expected = 3.0f * std::exp2(calls - 1);
  for (const auto& own : all) {
    EXPECT_EQ(own->x->ToHost(), std::vector<float>(128, expected));
  }
}

TEST_P(AllReduceVariantTest, MixesSizesAndVariantsWithoutLosingCount) {
  ISTHMUS_REQUIRE_DEVICE();
  if (is_nccl()) GTEST_SKIP() << "counts by itself";
  constexpr int kRanks = 4;
  if (NeedsADeviceEach() && NumDevices() < kRanks) GTEST_SKIP() << "needs four GPUs";
  const Shape s = {16, 512, 512, 512};
  const std::vector<int> devices = DevicesFor(kRanks);
  const std::unique_ptr<PeerGroup> group = MakeGroup(devices, 1 << 16);
  std::vector<std::unique_ptr<Rank>> all;
  for (int r = 0; r < kRanks; ++r) {
    all.push_back(std::make_unique<Rank>(devices[static_cast<size_t>(r)], s,
                                         std::vector<float>(16 * 512, 1.0f)));
  }
  RunRanks(devices, [&](int r) {
    Rank& own = *all[static_cast<size_t>(r)];
    for (int i = 0; i < 12; ++i) {
      Shape part = s;
      part.rows = 1 + i * 5 % 16;  // Other grids, so other flags.
      const AllReduceArgs args = own.Args(part, DType::kF32, false);
      const AllReduceCall call = {args, group->communicator(r)};
      const auto launch = i % 3 == 2 ? LaunchAllReducePeers : variant().launch;
      EXPECT_TRUE(launch(call, own.test_device->exec()).ok());
    }
    own.test_device->Finish();
  });
  for (const auto& own : all) {
    EXPECT_EQ(own->Result(s)[0], 4.0f);
    EXPECT_EQ(own->Result(s)[15 * 512 + 511], 4.0f);
  }
}

INSTANTIATE_TEST_SUITE_P(Table, AllReduceVariantTest, ::testing::ValuesIn(CudaVariants()),
                         [](const ::testing::TestParamInfo<size_t>& param) {
                           const AllReduceVariant& variant = AllReduceVariants()[param.param];
                           if (variant.patch != nullptr) return std::string("OneShot");
                           return std::string(variant.launch == LaunchAllReduceNccl ? "Nccl"
                                                                                    : "Peers");
                         });

TEST(AllReduceCudaTest, CopiesOrRoundsForOneRank) {
  ISTHMUS_REQUIRE_DEVICE();
  const Shape s = {3, 10, 12, 11};
  const std::vector<float> values = testing::NormalValues(5, 30);
  Rank own(0, s, values);
  const absl::Status status = AllReduce(own.Args(s, DType::kBf16, false), own.test_device->exec());
  ASSERT_TRUE(status.ok()) << status;
  own.test_device->Finish();
  EXPECT_TRUE(testing::SameBits(own.Result(s), values));
  ASSERT_TRUE(AllReduce(own.Args(s, DType::kF32, true), own.test_device->exec()).ok());
  own.test_device->Finish();
  EXPECT_EQ(own.Result(s)[7], RoundBf16(values[7]));
}

// A rank whose peer does not come.
void RunAlone(absl::Status (*launch)(const AllReduceCall&, const Exec&)) {
  const Shape s = {1, 8, 8, 8};
  const auto group = MakeGroup({0, 0}, 256, absl::Milliseconds(20));
  Rank own(0, s, std::vector<float>(8, 1.0f));
  const AllReduceArgs args = own.Args(s, DType::kF32, false);
  (void)launch({args, group->communicator(0)}, own.test_device->exec());
}

// A trap takes the whole device with it, so only the emulator can afford one: there it ends the
// process, which is what the product does as well.
TEST(AllReduceDeathTest, TrapsWhenARankNeverArrives) {
  if (IsRealDevice() || NumDevices() == 0) GTEST_SKIP() << "only in the emulator";
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_DEATH(RunAlone(LaunchAllReducePeers), "__trap");
  EXPECT_DEATH(RunAlone(LaunchAllReduceOneShot), "__trap");
}

TEST(PeerGroupCudaTest, TellsWhoWaitedForWhom) {
  ISTHMUS_REQUIRE_DEVICE();
  const auto group = MakeGroup({0, 0}, 256);
  EXPECT_TRUE(group->communicator(1).shares_device);
  CommunicatorFault& fault = *group->communicator(1).fault;
  fault.rank = 1;
  fault.missing_rank = 0;
  fault.missing_call = 6;
  fault.call = 7;
  EXPECT_EQ(group->Fault().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(group->Fault().message()),
              ::testing::HasSubstr("call 7: rank 1 waited for rank 0, which had announced call 6"));
}

}  // namespace
}  // namespace isthmus::kernels
