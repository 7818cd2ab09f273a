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

TEST(WeightTilesTest, HoldEveryElementAndScale) {
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
        WeightFormat::kNvfp4}) {
    for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 64}, {40, 96}, {130, 256}}) {
      const OwnedWeight weight = RandomWeight(7, format, rows, cols);
      std::vector<std::byte> bytes(static_cast<size_t>(TiledBytes(weight.view)));
      const WeightView tiled = TileWeight(weight.view, bytes.data());
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t k = 0; k < cols; ++k) {
          ASSERT_EQ(WeightElement(tiled, n, k), WeightElement(weight.view, n, k))
              << static_cast<int>(format) << ": " << n << ", " << k;
          ASSERT_EQ(WeightScale(tiled, n, k), WeightScale(weight.view, n, k))
              << static_cast<int>(format) << ": " << n << ", " << k;
        }
      }
    }
  }
}

TEST(WeightTilesTest, ASliceOfRowsIsAShareOfTheTiles) {
  const OwnedWeight weight = RandomWeight(8, WeightFormat::kMxfp4, 64, 128);
  std::vector<std::byte> bytes(static_cast<size_t>(TiledBytes(weight.view)));
  const WeightView tiled = TileWeight(weight.view, bytes.data());
  const WeightView slice = RowSlice(tiled, 32, 16);
  for (int64_t n = 0; n < 16; ++n) {
    for (int64_t k = 0; k < 128; ++k) {
      ASSERT_EQ(WeightElement(slice, n, k), WeightElement(weight.view, 32 + n, k));
      ASSERT_EQ(WeightScale(slice, n, k), WeightScale(weight.view, 32 + n, k));
    }
  }
}

}  // namespace
}  // namespace isthmus::kernels
