// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of rope within its bound, and the trusted one bit for bit the CPU's.
#include <cmath>
#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/rope/rope_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const RopeVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;

struct ShapeCase {
  int64_t tokens, heads, head_dim;
  int rope_dim;
};

class RopeCudaTest : public ::testing::TestWithParam<RopeVariant> {};

TEST_P(RopeCudaTest, StaysWithinItsBoundAndLeavesTheRestAlone) {
  ISTHMUS_REQUIRE_DEVICE();
  const RopeVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  constexpr ShapeCase kCases[] = {{1, 64, 512, 64}, {5, 3, 10, 6}, {2, 1, 2, 2}, {3, 2, 128, 128}};
  const std::vector<int64_t> all_positions = {7, 0, 131071, 2147483647, 1};
  for (const ShapeCase& c : kCases) {
    for (const bool inverse : {false, true}) {
      for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
        const int64_t cols = c.heads * c.head_dim;
        const int64_t stride = cols + 7;
        const std::vector<float> x = kernels::testing::NormalValues(1, c.tokens * stride);
        const std::vector<int64_t> positions(all_positions.begin(),
                                             all_positions.begin() + c.tokens);
        const std::vector<float> frequency =
            RopeFrequencies({.rope_dim = c.rope_dim, .original_positions = 65536});
        const auto args = [&](float* data, std::span<const int64_t> at, std::span<const float> f) {
          return RopeArgs{.x = {data, DType::kF32, c.tokens, cols, stride},
                          .head_dim = c.head_dim,
                          .positions = at,
                          .frequency = f,
                          .inverse = inverse,
                          .arithmetic = arithmetic};
        };
        std::vector<float> cpu = x;
        std::vector<float> exact = x;
        ASSERT_TRUE(Rope(args(cpu.data(), positions, frequency), Exec{}).ok());
        ASSERT_TRUE(RopeDefinition(args(exact.data(), positions, frequency), Exec{}).ok());

        const DeviceCopy<int64_t> there_positions(positions);
        const DeviceCopy<float> there_frequency(frequency);
        std::vector<float> first;
        for (int run = 0; run < 2; ++run) {
          const DeviceCopy<float> there(x);
          const RopeArgs device_args =
              args(there.data(), {there_positions.data(), positions.size()},
                   {there_frequency.data(), frequency.size()});
          ASSERT_TRUE(ValidateRope(device_args, device.exec().arch).ok());
          if (variant.supports != nullptr && !variant.supports(device_args)) continue;
          ASSERT_TRUE(variant.launch(device_args, device.exec()).ok());
          device.Finish();
          const std::vector<float> got = there.ToHost();
          EXPECT_TRUE(there.Intact());
          if (variant.patch == nullptr) {
            EXPECT_TRUE(SameBits(got, cpu));
          }
          if (arithmetic == Arithmetic::kMath) {
            const NumericBound bound =
                variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
            EXPECT_TRUE(kernels::testing::WithinBound(got, cpu, exact, bound));
          }
          if (run == 0) first = got;
          EXPECT_TRUE(SameBits(got, first));
        }
      }
    }
  }
}

TEST_P(RopeCudaTest, TakesNoTokens) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  const std::vector<float> frequency = {1.0f};
  const RopeArgs args = {
      .x = F32Matrix(nullptr, 0, 4), .head_dim = 4, .positions = {}, .frequency = frequency};
  EXPECT_TRUE(GetParam().launch(args, device.exec()).ok());
}

INSTANTIATE_TEST_SUITE_P(Table, RopeCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(RopeVariants())),
                         kernels::testing::VariantName<RopeVariant>);

}  // namespace
}  // namespace isthmus::kernels
