// SPDX-License-Identifier: Apache-2.0
#include "kernels/elementwise/elementwise.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/quantise.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

TEST(ElementwiseTest, EveryStreamStartsFromTheTokensRow) {
  const std::vector<uint16_t> table = {Bf16Bits(1.0f), Bf16Bits(2.0f), Bf16Bits(-3.0f),
                                       Bf16Bits(4.0f)};
  const WeightView view = {
      .format = WeightFormat::kBf16, .rows = 2, .cols = 2, .elements = table.data()};
  const std::vector<int32_t> tokens = {1, -1, 0};
  std::vector<float> streams(12, std::numeric_limits<float>::quiet_NaN());
  ASSERT_TRUE(
      EmbedTokens(
          {.tokens = tokens.data(), .table = view, .streams = F32Matrix(streams.data(), 3, 4)}, {})
          .ok());
  EXPECT_EQ(streams, (std::vector<float>{-3, 4, -3, 4, 0, 0, 0, 0, 1, 2, 1, 2}));
}

TEST(ElementwiseTest, RowsAreGatheredInTheOrderAsked) {
  std::vector<float> x = {1, 2, 3, 4, 5, 6};
  std::vector<float> out(6, -1.0f);
  const std::vector<int32_t> rows = {2, -1, 0};
  ASSERT_TRUE(
      GatherRows(
          {.x = F32Matrix(x.data(), 3, 2), .rows = rows.data(), .out = F32Matrix(out.data(), 3, 2)},
          {})
          .ok());
  EXPECT_EQ(out, (std::vector<float>{5, 6, 0, 0, 1, 2}));
}

TEST(ElementwiseTest, AKvRowIsWhatItsEntryDecodesTo) {
  std::vector<float> x = testing::OutlierValues(3, 512);
  for (size_t d = 448; d < 512; ++d) x[d] = RoundBf16(x[d]);
  std::vector<std::byte> bytes(576);
  std::vector<std::byte> scales(8);
  std::vector<float> decoded(512);
  EncodeKvEntry(x.data(), 512, 64, bytes.data(), scales.data());
  DecodeKvEntry(bytes.data(), scales.data(), 512, 64, decoded.data());
  ASSERT_TRUE(RoundTripKv({.x = F32Matrix(x.data(), 1, 512)}, {}).ok());
  EXPECT_EQ(x, decoded);
}

TEST(ElementwiseTest, OnlyTheReferenceRoundsWhatIsScaled) {
  std::vector<float> x = {1.01f, -2.0f};
  const float scaled = 1.01f * 0.3f;
  ASSERT_TRUE(
      ScaleRows({.x = F32Matrix(x.data(), 1, 2), .scale = 0.3f, .arithmetic = Arithmetic::kMath},
                {})
          .ok());
  EXPECT_EQ(x[0], scaled);
  x[0] = 1.01f;
  ASSERT_TRUE(ScaleRows({.x = F32Matrix(x.data(), 1, 2), .scale = 0.3f}, {}).ok());
  EXPECT_EQ(x[0], RoundBf16(scaled));
}

TEST(ElementwiseTest, RefusesColumnsThatAreNotWholeBlocks) {
  std::vector<float> x(100);
  const absl::Status status = RoundTripKv({.x = F32Matrix(x.data(), 1, 100)}, {});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("100 columns less 64"), absl::string_view::npos);
}

}  // namespace
}  // namespace isthmus::kernels
