// SPDX-License-Identifier: Apache-2.0
// Packing into tiles, verified by unpacking.
#include "kernels/core/weight_tiles.h"

#include <gtest/gtest.h>

#include <vector>

#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using kernels::testing::OwnedWeight;
using kernels::testing::RandomWeight;

void ExpectSame(const WeightView& tiled, const WeightView& stored) {
  for (int64_t n = 0; n < stored.rows; ++n) {
    for (int64_t k = 0; k < stored.cols; ++k) {
      ASSERT_EQ(WeightElement(tiled, n, k), WeightElement(stored, n, k))
          << static_cast<int>(stored.format) << ": " << n << ", " << k;
      ASSERT_EQ(WeightScale(tiled, n, k), WeightScale(stored, n, k))
          << static_cast<int>(stored.format) << ": " << n << ", " << k;
    }
  }
}

TEST(WeightTilesTest, HoldEveryElementAndScale) {
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
        WeightFormat::kNvfp4}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 64}, {40, 96}, {130, 256}}) {
      const OwnedWeight weight = RandomWeight(7, format, rows, cols);
      for (const int arch : {kArchSm90, kArchSm120}) {
        std::vector<std::byte> bytes(static_cast<size_t>(TiledBytes(weight.view)));
        const WeightLayout layout = TileLayout(format, arch);
        const WeightView tiled = TileWeight(weight.view, bytes.data(), layout);
        EXPECT_EQ(tiled.layout, layout);
        ExpectSame(tiled, weight.view);
      }
    }
  }
}

TEST(WeightTilesTest, ASliceOfRowsIsAShareOfTheTiles) {
  const OwnedWeight weight = RandomWeight(8, WeightFormat::kMxfp4, 64, 128);
  for (const WeightLayout layout : {WeightLayout::kMmaTiles, WeightLayout::kMmaTilesF16}) {
    std::vector<std::byte> bytes(static_cast<size_t>(TiledBytes(weight.view)));
    const WeightView tiled = TileWeight(weight.view, bytes.data(), layout);
    ExpectSame(RowSlice(tiled, 32, 16), RowSlice(weight.view, 32, 16));
  }
}

}  // namespace
}  // namespace isthmus::kernels
