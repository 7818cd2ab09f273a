// SPDX-License-Identifier: Apache-2.0
// Each instruction wrapper does what its comment says, over whole tiles: on a GPU this tests the
// wrapper, in the emulator the emulation, with the same expectations.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "kernels/core/async_copy.cuh"
#include "kernels/core/fast_math.cuh"
#include "kernels/core/mma.cuh"
#include "kernels/core/pairs.cuh"
#include "kernels/core/weight_tiles.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::DeviceCopy;
using kernels::testing::OwnedWeight;
using kernels::testing::RandomWeight;
using kernels::testing::TestDevice;

// C[16][8] = A B for a tile A as weight_tiles.h stores it and B [8][K] with K contiguous.
template <WeightFormat kFormat>
__global__ void MultiplyTile(const uint8_t* tile, const uint32_t* b_rows, int words_per_row,
                             float* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const uint4 words = LoadStream16(tile + 16 * lane);
  const uint32_t a[4] = {words.x, words.y, words.z, words.w};
  const uint32_t* row = b_rows + lane / 4 * words_per_row;
  const uint32_t b[2] = {row[lane % 4], row[lane % 4 + 4]};
  float c[4] = {};
  if constexpr (kFormat == WeightFormat::kF32) MmaTf32(c, a, b);
  if constexpr (kFormat == WeightFormat::kBf16) MmaBf16(c, a, b);
  if constexpr (kFormat == WeightFormat::kFp8Block128) MmaE4m3(c, a, b);
  for (int i = 0; i < 4; ++i) {
    out[(lane / 4 + (i >= 2 ? 8 : 0)) * 8 + lane % 4 * 2 + i % 2] = c[i];
  }
}

template <WeightFormat kFormat>
void ExpectTileProduct(int64_t k, double tolerance) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  OwnedWeight a = RandomWeight(1, kFormat, 16, k);
  OwnedWeight b = RandomWeight(2, kFormat, 8, k);
  if (kFormat == WeightFormat::kF32) {  // On the grid of tf32, so that both sides see one number.
    for (OwnedWeight* one : {&a, &b}) {
      for (uint64_t& word : one->elements) word &= 0xffffe000ffffe000u;
    }
  }
  std::vector<std::byte> tile(static_cast<size_t>(TiledBytes(a.view)));
  TileWeight(a.view, tile.data());
  const DeviceCopy<std::byte> device_tile(tile);
  const DeviceCopy<uint64_t> device_b(b.elements);
  const DeviceCopy<float> out(128);
  ASSERT_TRUE(Launch("MultiplyTile", {.grid = dim3(1), .block = dim3(32)}, device.exec(),
                     MultiplyTile<kFormat>, reinterpret_cast<const uint8_t*>(device_tile.data()),
                     reinterpret_cast<const uint32_t*>(device_b.data()), 8, out.data())
                  .ok());
  device.Finish();
  const std::vector<float> got = out.ToHost();
  for (int64_t m = 0; m < 16; ++m) {
    for (int64_t n = 0; n < 8; ++n) {
      double sum = 0.0;
      double magnitude = 0.0;
      for (int64_t i = 0; i < k; ++i) {
        const double product =
            double{WeightElement(a.view, m, i)} * double{WeightElement(b.view, n, i)};
        sum += product;
        magnitude += std::fabs(product);
      }
      EXPECT_NEAR(got[static_cast<size_t>(m * 8 + n)], sum, tolerance * magnitude)
          << m << ", " << n;
    }
  }
  EXPECT_TRUE(out.Intact());
}

TEST(InstructionsTest, MmaMultipliesATileOfTf32) { ExpectTileProduct<WeightFormat::kF32>(8, 1e-6); }
TEST(InstructionsTest, MmaMultipliesATileOfBf16) {
  ExpectTileProduct<WeightFormat::kBf16>(16, 1e-6);
}
TEST(InstructionsTest, MmaMultipliesATileOfE4m3) {
  // The hardware keeps fewer bits than f32 of an 8-bit product's sum.
  ExpectTileProduct<WeightFormat::kFp8Block128>(32, 1e-3);
}

// out[2 i] = 2^x[i], out[2 i + 1] = 1 / x[i].
__global__ void Approximate(const float* x, float* out) {
  const int i = static_cast<int>(threadIdx.x);
  out[2 * i] = FastExp2(x[i]);
  out[2 * i + 1] = FastReciprocal(x[i]);
}

TEST(InstructionsTest, ApproximationsAreWithinTwoUlp) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  std::vector<float> x = kernels::testing::NormalValues(4, 128);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(i % 8 + 1);
  const DeviceCopy<float> input(x);
  const DeviceCopy<float> out(256);
  ASSERT_TRUE(Launch("Approximate", {.grid = dim3(1), .block = dim3(128)}, device.exec(),
                     Approximate, static_cast<const float*>(input.data()), out.data())
                  .ok());
  device.Finish();
  const std::vector<float> got = out.ToHost();
  for (size_t i = 0; i < x.size(); ++i) {
    const double power = std::exp2(double{x[i]});
    const double reciprocal = 1.0 / double{x[i]};
    EXPECT_NEAR(got[2 * i], power, 3e-7 * power) << x[i];
    EXPECT_NEAR(got[2 * i + 1], reciprocal, 3e-7 * std::fabs(reciprocal)) << x[i];
  }
}

__global__ void ConvertToE4m3(const float* values, uint32_t* words) {
  const float* four = values + 4 * threadIdx.x;
  words[threadIdx.x] = E4m3Codes(four[0], four[1], four[2], four[3]);
}

TEST(InstructionsTest, E4m3CodesRoundAsTheHostDoes) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  std::vector<float> values = {0.0f, -0.0f, 448.0f, 500.0f, -1e30f, 0x1p-9f, 0x1.8p-9f, 0x1p-10f};
  for (int i = 8; i < 256; ++i) values.push_back((i % 2 == 0 ? 0.37f : -0.0123f) * i);
  const DeviceCopy<float> input(values);
  const DeviceCopy<uint32_t> words(64);
  ASSERT_TRUE(Launch("ConvertToE4m3", {.grid = dim3(1), .block = dim3(64)}, device.exec(),
                     ConvertToE4m3, input.data(), words.data())
                  .ok());
  device.Finish();
  const std::vector<uint32_t> got = words.ToHost();
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(got[i / 4] >> (8 * (i % 4)) & 0xffu, Fp8E4m3Code(values[i])) << values[i];
  }
}

__global__ void LoadMatrices(const uint16_t* matrix, uint32_t* plain, uint32_t* transposed) {
  auto* shared = reinterpret_cast<uint16_t*>(DynamicShared());
  const int lane = static_cast<int>(threadIdx.x);
  CopyAsync16(shared + 8 * lane, matrix + 8 * lane);
  CommitCopies();
  WaitForCopies<0>();
  __syncwarp();
  uint32_t words[4];
  LoadMatrix<4, false>(words, shared + 8 * lane);
  for (int i = 0; i < 4; ++i) plain[4 * lane + i] = words[i];
  LoadMatrix<4, true>(words, shared + 8 * lane);
  for (int i = 0; i < 4; ++i) transposed[4 * lane + i] = words[i];
}

TEST(InstructionsTest, LdmatrixHandsOutRowsAndColumns) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  std::vector<uint16_t> matrix(256);  // Four 8 x 8 matrices, one after another.
  std::iota(matrix.begin(), matrix.end(), uint16_t{0});
  const DeviceCopy<uint16_t> input(matrix);
  const DeviceCopy<uint32_t> plain(128);
  const DeviceCopy<uint32_t> transposed(128);
  ASSERT_TRUE(Launch("LoadMatrices", {.grid = dim3(1), .block = dim3(32), .shared_bytes = 512},
                     device.exec(), LoadMatrices, static_cast<const uint16_t*>(input.data()),
                     plain.data(), transposed.data())
                  .ok());
  device.Finish();
  const auto rows = plain.ToHost();
  const auto columns = transposed.ToHost();
  for (uint32_t lane = 0; lane < 32; ++lane) {
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t g = lane / 4;
      const uint32_t t = lane % 4;
      const uint32_t row = 64 * i + 8 * g + 2 * t;
      EXPECT_EQ(rows[4 * lane + i], row | (row + 1) << 16);
      const uint32_t column = 64 * i + 16 * t + g;
      EXPECT_EQ(columns[4 * lane + i], column | (column + 8) << 16);
    }
  }
}

constexpr int kStages = 3;
constexpr int kStageFloats = 64;

// Sums `count` stages of 64 floats through a ring of bulk copies, one producer and 64 consumers.
__global__ void SumThroughARing(const float* input, int count, float* out) {
  auto* ring = reinterpret_cast<float*>(DynamicShared());
  __shared__ Mbarrier full[kStages];
  __shared__ Mbarrier empty[kStages];
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      BarrierInit(&full[s], 1);
      BarrierInit(&empty[s], kStageFloats);
    }
    FenceBarrierInit();
  }
  __syncthreads();
  if (threadIdx.x == kStageFloats) {
    for (int i = 0; i < count; ++i) {
      const int s = i % kStages;
      if (i >= kStages) BarrierWait(&empty[s], static_cast<unsigned>(i / kStages - 1) % 2);
      BarrierArriveExpect(&full[s], kStageFloats * 4);
      BulkCopyOnce(ring + s * kStageFloats, input + i * kStageFloats, kStageFloats * 4, &full[s]);
    }
  } else if (threadIdx.x < kStageFloats) {
    float sum = 0.0f;
    for (int i = 0; i < count; ++i) {
      const int s = i % kStages;
      BarrierWait(&full[s], static_cast<unsigned>(i / kStages) % 2);
      sum += ring[s * kStageFloats + threadIdx.x];
      BarrierArrive(&empty[s]);
    }
    out[threadIdx.x] = sum;
  }
}

TEST(InstructionsTest, BulkCopiesCompleteOnTheirBarrier) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  const int count = 20;
  std::vector<float> values(count * kStageFloats);
  std::iota(values.begin(), values.end(), 0.0f);
  const DeviceCopy<float> input(values);
  const DeviceCopy<float> out(kStageFloats);
  ASSERT_TRUE(Launch("SumThroughARing",
                     {.grid = dim3(1),
                      .block = dim3(96),
                      .shared_bytes = kStages * kStageFloats * sizeof(float)},
                     device.exec(), SumThroughARing, static_cast<const float*>(input.data()), count,
                     out.data())
                  .ok());
  device.Finish();
  const auto sums = out.ToHost();
  for (int i = 0; i < kStageFloats; ++i) {
    float expected = 0.0f;
    for (int k = 0; k < count; ++k) expected += values[static_cast<size_t>(k * kStageFloats + i)];
    EXPECT_EQ(sums[static_cast<size_t>(i)], expected);
  }
}

// The last block to come adds up what the others wrote.
__global__ void SumInTheLastBlock(unsigned* counter, float* parts, float* out) {
  __shared__ unsigned turn;
  if (threadIdx.x == 0) parts[blockIdx.x] = static_cast<float>(blockIdx.x + 1);
  if (TakeTurn(counter, gridDim.x, &turn) != gridDim.x - 1) return;
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (unsigned i = 0; i < gridDim.x; ++i) sum += __ldcg(parts + i);
    *out = sum;
  }
}

TEST(InstructionsTest, TheLastBlockSeesTheOthersWrites) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  DeviceCopy<unsigned> counter(std::vector<unsigned>{0});
  const DeviceCopy<float> parts(100);
  const DeviceCopy<float> out(1);
  for (int run = 0; run < 2; ++run) {
    ASSERT_TRUE(Launch("SumInTheLastBlock", {.grid = dim3(100), .block = dim3(64)}, device.exec(),
                       SumInTheLastBlock, counter.data(), parts.data(), out.data())
                    .ok());
    device.Finish();
    EXPECT_EQ(out.ToHost()[0], 5050.0f);
    EXPECT_EQ(counter.ToHost()[0], 0u);
  }
}

__global__ void AddOne(int* value) {
  if (threadIdx.x == 0) *value += 1;
}

TEST(InstructionsTest, AGraphReplaysItsLaunches) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  DeviceCopy<int> value(std::vector<int>{0});
  ASSERT_TRUE(DeviceGraph::BeginCapture(device.stream()).ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(
        Launch("AddOne", {.grid = dim3(1), .block = dim3(32)}, device.exec(), AddOne, value.data())
            .ok());
  }
  absl::StatusOr<DeviceGraph> graph = DeviceGraph::EndCapture(device.stream());
  ASSERT_TRUE(graph.ok()) << graph.status();
  EXPECT_EQ(graph->num_nodes(), 3);
  EXPECT_EQ(value.ToHost()[0], 0);
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(graph->Replay(device.stream()).ok());
  device.Finish();
  EXPECT_EQ(value.ToHost()[0], 6);
}

}  // namespace
}  // namespace isthmus::kernels
