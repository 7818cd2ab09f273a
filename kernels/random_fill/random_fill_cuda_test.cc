// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/random_fill/random_fill.h"
#include "kernels/testing/device.h"

namespace isthmus::kernels {
namespace {

using testing::DeviceCopy;
using testing::TestDevice;

TEST(RandomFillTest, PartsHaveTheirFormatsAndNothingElseIsWritten) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  // Two planes of three records: 448 e4m3 codes, then 128 bytes of bf16; a gap behind each plane.
  const int64_t stride = 3 * 576 + 12;
  const DeviceCopy<uint8_t> memory(2 * stride, 0xff);
  RandomFillArgs args = {.to = reinterpret_cast<std::byte*>(memory.data()),
                         .planes = 2,
                         .plane_stride = stride,
                         .records = 3,
                         .first = {.kind = RandomKind::kFp8, .bytes = 448},
                         .second = {.kind = RandomKind::kBf16, .bytes = 128, .limit = 2.0f},
                         .seed = 5};
  ASSERT_TRUE(RandomFill(args, device.exec()).ok());
  device.Finish();
  const std::vector<uint8_t> bytes = memory.ToHost();
  EXPECT_TRUE(memory.Intact());
  double sum = 0.0;
  for (int64_t i = 0; i < 2 * stride; ++i) {
    const int64_t in_plane = i % stride;
    if (in_plane >= 3 * 576) {
      EXPECT_EQ(bytes[static_cast<size_t>(i)], 0xff) << i;
    } else if (in_plane % 576 < 448) {
      EXPECT_FALSE(std::isnan(Fp8E4m3Value(bytes[static_cast<size_t>(i)]))) << i;
    } else if (i % 2 == 0) {
      uint16_t bits = 0;
      std::memcpy(&bits, &bytes[static_cast<size_t>(i)], 2);
      EXPECT_LE(std::fabs(Bf16Value(bits)), 2.0f) << i;
      sum += Bf16Value(bits);
    }
  }
  EXPECT_NE(sum, 0.0);
  args.seed = 6;
  ASSERT_TRUE(RandomFill(args, device.exec()).ok());
  device.Finish();
  EXPECT_NE(bytes, memory.ToHost());
}

TEST(RandomFillTest, ScalesStayInTheirRange) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  const DeviceCopy<uint8_t> memory(4096);
  ASSERT_TRUE(
      RandomFill({.to = reinterpret_cast<std::byte*>(memory.data()),
                  .records = 1024,
                  .first = {.kind = RandomKind::kByteOfMask, .bytes = 4, .base = 0x38, .mask = 7}},
                 device.exec())
          .ok());
  device.Finish();
  for (const uint8_t byte : memory.ToHost()) {
    EXPECT_GE(byte, 0x38);
    EXPECT_LE(byte, 0x3f);
  }
  EXPECT_FALSE(RandomFill({.first = {.bytes = 3}}, device.exec()).ok());
}

}  // namespace
}  // namespace isthmus::kernels
