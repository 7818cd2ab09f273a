// SPDX-License-Identifier: Apache-2.0
// The kernels of elementwise give the bits of the CPU, at strides and odd sizes, and write nothing
// else.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"

namespace isthmus::kernels {
namespace {

using testing::DeviceCopy;
using testing::DeviceWeight;
using testing::OutlierValues;
using testing::OwnedWeight;
using testing::RandomWeight;
using testing::TestDevice;

// Runs `op` on a host matrix and on its copy on the device, and compares every byte of both.
template <typename Op>
void ExpectSameBits(std::vector<float> values, int64_t rows, int64_t cols, int64_t stride,
                    const Op& op) {
  TestDevice device;
  const DeviceCopy<float> copy(values);
  const absl::Status on_host =
      op(MatrixView{values.data(), DType::kF32, rows, cols, stride}, Exec{});
  const absl::Status on_device =
      op(MatrixView{copy.data(), DType::kF32, rows, cols, stride}, device.exec());
  ASSERT_TRUE(on_host.ok()) << on_host;
  ASSERT_TRUE(on_device.ok()) << on_device;
  device.Finish();
  const std::vector<float> found = copy.ToHost();
  EXPECT_EQ(0, std::memcmp(found.data(), values.data(), 4 * values.size()));
  EXPECT_TRUE(copy.Intact());
}

TEST(ElementwiseCudaTest, RoundTripAndScale) {
  ISTHMUS_REQUIRE_DEVICE();
  for (const int64_t rows : {0, 1, 3}) {
    const std::vector<float> values = OutlierValues(1, 3 * 530);
    ExpectSameBits(values, rows, 512, 530, [](const MatrixView& x, const Exec& exec) {
      return RoundTripKv({.x = x}, exec);
    });
    for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
      ExpectSameBits(values, rows, 7, 530, [&](const MatrixView& x, const Exec& exec) {
        return ScaleRows({.x = x, .scale = 0.011f, .arithmetic = arithmetic}, exec);
      });
    }
  }
}

TEST(ElementwiseCudaTest, EmbeddingAndGatherWithPadding) {
  ISTHMUS_REQUIRE_DEVICE();
  const int64_t hidden = 1100;  // More than a block's columns, and not a multiple.
  const OwnedWeight table = RandomWeight(2, WeightFormat::kBf16, 5, hidden);
  const DeviceWeight device_table(table.view, WeightLayout::kRowMajor);
  const std::vector<int32_t> tokens = {4, -1, 0};
  const DeviceCopy<int32_t> device_tokens(tokens);
  ExpectSameBits(std::vector<float>(static_cast<size_t>(3 * 4 * hidden), 7.0f), 3, 4 * hidden,
                 4 * hidden, [&](const MatrixView& x, const Exec& exec) {
                   const bool on_device = IsDevice(exec.arch);
                   return EmbedTokens({.tokens = on_device ? device_tokens.data() : tokens.data(),
                                       .table = on_device ? device_table.view() : table.view,
                                       .streams = x},
                                      exec);
                 });

  std::vector<float> x = OutlierValues(3, 6 * hidden);
  const DeviceCopy<float> device_x(x);
  ExpectSameBits(std::vector<float>(static_cast<size_t>(3 * hidden), 7.0f), 3, hidden, hidden,
                 [&](const MatrixView& out, const Exec& exec) {
                   const bool on_device = IsDevice(exec.arch);
                   return GatherRows(
                       {.x = F32Matrix(on_device ? device_x.data() : x.data(), 6, hidden),
                        .rows = on_device ? device_tokens.data() : tokens.data(),
                        .out = out},
                       exec);
                 });
}

}  // namespace
}  // namespace isthmus::kernels
