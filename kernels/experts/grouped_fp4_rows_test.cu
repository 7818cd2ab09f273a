// SPDX-License-Identifier: Apache-2.0
// The fragments of experts.grouped_w4a4 over whole tiles, bit for bit against plain loops over
// unpacked numbers: which input meets which, under which two scales. Runs in the emulator; on a GPU
// of another architecture it is skipped and counted.
#include "kernels/experts/grouped_fp4_rows.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/core/weight_tiles.h"
#include "kernels/experts/experts_grouped.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels::grouped {
namespace {

using kernels::testing::DeviceCopy;
using kernels::testing::Random;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;

constexpr int64_t kInputs = 256;  // Two groups.

bool HasBlockScaledMma() {
  return NumDevices() > 0 && (!IsRealDevice() || PropertiesOf(0).value().arch == kArchSm120);
}

// Sixteen outputs of eight rows of each block. Grid: 1. Block: a warp.
template <WeightFormat kFormat, int kBlocks>
__global__ void Multiply(const uint8_t* tiles, Fp4Target from, float* out) {
#if ISTHMUS_HAS_SM120A
  const int lane = static_cast<int>(threadIdx.x);
  Fp4Places<kBlocks> places;
  places.codes = from.codes;
  places.scales = from.scales;
  for (int nb = 0; nb < kBlocks; ++nb) {
    places.first_code[nb] = static_cast<uint32_t>((8 * nb + lane / 4) * kInputs);
  }
  float totals[kBlocks][4] = {};
  for (int group = 0; group < kInputs / 128; ++group) {
    Fp4Rows<kBlocks> rows;
    rows.Load(places, group);
    MultiplyFp4RowsGroup<kFormat, kBlocks>(tiles + group * 2 * TileBytes(kFormat), rows, totals);
  }
  for (int nb = 0; nb < kBlocks; ++nb) {
    for (int i = 0; i < 4; ++i) {
      const int n = lane / 4 + (i >= 2 ? 8 : 0);
      out[(8 * nb + 2 * (lane % 4) + i % 2) * 16 + n] = totals[nb][i];
    }
  }
#else
  (void)tiles, (void)from, (void)out;
  __trap();
#endif
}

// Random codes and scales of rows, packed as the quantiser packs them.
struct PackedRows {
  PackedRows(uint64_t seed, int64_t rows) : codes(size_t(rows * kInputs)) {
    Random random(seed);
    words.resize(size_t(rows * kInputs / 8));
    for (uint8_t& code : codes) code = static_cast<uint8_t>(random.Below(16));
    for (int64_t i = 0; i < rows * kInputs / 16; ++i) {
      scales.push_back(static_cast<uint8_t>(random.Below(0x7f)));
    }
    for (int64_t r = 0; r < rows; ++r) {
      for (int run = 0; run < kInputs / 16; ++run) {
        uint8_t of_run[16];
        for (int k = 0; k < 16; ++k) of_run[k] = codes[size_t(r * kInputs + run * 16 + k)];
        uint32_t packed[2];
        PackFp4Run(of_run, packed);
        for (int i = 0; i < 2; ++i) {
          const int byte = Fp4WordPlace(run / 8, run / 4 % 2, run / 2 % 2, 2 * (run % 2) + i);
          words[size_t(r * kInputs / 8 + byte / 4)] = packed[i];
        }
      }
    }
  }
  double Value(int64_t row, int64_t k) const {
    return double{Fp4E2m1Value(codes[size_t(row * kInputs + k)])} *
           Fp8E4m3Value(scales[size_t((row * kInputs + k) / 16)]);
  }
  std::vector<uint8_t> codes;  // [rows, inputs]
  std::vector<uint8_t> scales;
  std::vector<uint32_t> words;
};

// Exactly what the kernel adds: 64 inputs in one rounding; of MXFP4 relative to the larger scale.
float Expected(const WeightView& w, const PackedRows& rows, int64_t row, int64_t n) {
  float total = 0.0f;
  for (int64_t first = 0; first < kInputs; first += 64) {
    const bool is_mx = w.format == WeightFormat::kMxfp4;
    const double larger =
        is_mx ? std::max(WeightScale(w, n, first), WeightScale(w, n, first + 32)) * 0x1p-8 : 1.0;
    double sum = is_mx ? 0.0 : total;
    for (int64_t k = first; k < first + 64; ++k) {
      sum += double{WeightElement(w, n, k)} * (WeightScale(w, n, k) / larger) * rows.Value(row, k);
    }
    total = is_mx ? std::fma(static_cast<float>(sum), static_cast<float>(larger), total)
                  : static_cast<float>(sum);
  }
  return total;
}

template <WeightFormat kFormat, int kBlocks>
void ExpectWholeTiles(uint64_t seed) {
  if (!HasBlockScaledMma()) GTEST_SKIP() << "no GPU with block-scaled mma";
  TestDevice device;
  const auto weight = kernels::testing::RandomWeight(seed, kFormat, 16, kInputs);
  std::vector<std::byte> tiles(size_t(kInputs / 64 * TileBytes(kFormat)));
  TileWeight(weight.view, tiles.data());
  const PackedRows rows(seed + 1, 8 * kBlocks);
  const DeviceCopy<std::byte> on_device(tiles);
  const DeviceCopy<uint32_t> words(rows.words);
  const DeviceCopy<uint8_t> scales(rows.scales);
  const DeviceCopy<float> out(8 * kBlocks * 16);
  const Fp4Target from = {reinterpret_cast<uint8_t*>(words.data()), scales.data(), nullptr};
  ASSERT_TRUE(Launch("Multiply", {.grid = dim3(1), .block = dim3(kWarpLanes)}, device.exec(),
                     Multiply<kFormat, kBlocks>, reinterpret_cast<const uint8_t*>(on_device.data()),
                     from, out.data())
                  .ok());
  device.Finish();
  std::vector<float> expected;
  for (int64_t row = 0; row < 8 * kBlocks; ++row) {
    for (int64_t n = 0; n < 16; ++n) expected.push_back(Expected(weight.view, rows, row, n));
  }
  EXPECT_TRUE(SameBits(out.ToHost(), expected));
}

TEST(GroupedFp4RowsTest, MultipliesTilesOfNvfp4) {
  ExpectWholeTiles<WeightFormat::kNvfp4, 1>(1);
  ExpectWholeTiles<WeightFormat::kNvfp4, 4>(2);
}
TEST(GroupedFp4RowsTest, MultipliesTilesOfMxfp4) {
  ExpectWholeTiles<WeightFormat::kMxfp4, 1>(3);
  ExpectWholeTiles<WeightFormat::kMxfp4, 4>(4);
}

// Down to 2^-17 of the larger of two neighbours, then nothing.
TEST(GroupedFp4RowsTest, HoldsScalesOfMxfp4RelativeToTheLarger) {
  for (int distance = 0; distance < 30; ++distance) {
    const float want = distance <= 17 ? PowerOfTwo(8 - distance) : 0.0f;
    EXPECT_EQ(Fp8E4m3Value(static_cast<uint8_t>(E4m3Below(distance))), want) << distance;
  }
}

}  // namespace
}  // namespace isthmus::kernels::grouped
