// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of rms_norm within its bound, and the trusted one bit for bit the CPU's.
#include <cmath>
#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/rms_norm/rms_norm_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const RmsNormVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::NormalValues;
using kernels::testing::OutlierValues;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;

// [rows, hidden] inside rows of `stride`, normalised on the CPU, by the definition, and naively.
struct HostCase {
  HostCase(int64_t rows_in, int64_t hidden_in, bool has_weight, Arithmetic arithmetic_in)
      : rows(rows_in), hidden(hidden_in), stride(hidden_in + 5), arithmetic(arithmetic_in) {
    x = OutlierValues(static_cast<uint64_t>(hidden), rows * stride, 3.0f);
    if (has_weight) weight = NormalValues(1, hidden);
  }
  RmsNormArgs Args(float* in, const float* w, float* out, int64_t out_stride) const {
    return {.x = {in, DType::kF32, rows, hidden, stride},
            .weight = {w, DType::kF32, static_cast<int64_t>(weight.size())},
            .out = {out, DType::kF32, rows, hidden, out_stride},
            .arithmetic = arithmetic};
  }
  std::vector<float> Run(absl::Status (*operation)(const RmsNormArgs&, const Exec&)) {
    std::vector<float> out(static_cast<size_t>(rows * hidden));
    const absl::Status status =
        operation(Args(x.data(), weight.data(), out.data(), hidden), Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  std::vector<float> Naive() const {
    std::vector<float> out;
    for (int64_t t = 0; t < rows; ++t) {
      const float* row = x.data() + t * stride;
      float sum = 0.0f;
      for (int64_t d = 0; d < hidden; ++d) sum += row[d] * row[d];
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(hidden) + 1e-6f);
      for (int64_t d = 0; d < hidden; ++d) {
        const float value = row[d] * scale;
        out.push_back(weight.empty() ? value : value * weight[static_cast<size_t>(d)]);
      }
    }
    return out;
  }

  int64_t rows, hidden, stride;
  Arithmetic arithmetic;
  std::vector<float> x, weight;
};

class RmsNormCudaTest : public ::testing::TestWithParam<RmsNormVariant> {};

TEST_P(RmsNormCudaTest, StaysWithinItsBoundAndRepeatsItsBits) {
  ISTHMUS_REQUIRE_DEVICE();
  const RmsNormVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  for (const int64_t hidden : {1, 15, 16, 17, 100, 512, 4096, 5000}) {
    for (const bool has_weight : {false, true}) {
      for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
        HostCase c(hidden > 1000 ? 2 : 5, hidden, has_weight, arithmetic);
        const DeviceCopy<float> x(c.x);
        const DeviceCopy<float> weight(c.weight);
        const DeviceCopy<float> out(c.rows * hidden);
        const RmsNormArgs args = c.Args(x.data(), weight.data(), out.data(), hidden);
        if (variant.supports != nullptr && !variant.supports(args)) continue;
        ASSERT_TRUE(variant.launch(args, device.exec()).ok());
        device.Finish();
        const std::vector<float> got = out.ToHost();
        EXPECT_TRUE(out.Intact());
        EXPECT_TRUE(SameBits(x.ToHost(), c.x));
        if (variant.patch == nullptr) {
          EXPECT_TRUE(SameBits(got, c.Run(RmsNorm))) << hidden;
        }
        if (arithmetic == Arithmetic::kMath) {
          const NumericBound bound =
              variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
          EXPECT_TRUE(WithinBound(got, c.Naive(), c.Run(RmsNormDefinition), bound)) << hidden;
        }
        ASSERT_TRUE(variant.launch(args, device.exec()).ok());
        device.Finish();
        EXPECT_TRUE(SameBits(out.ToHost(), got));
      }
    }
  }
}

TEST_P(RmsNormCudaTest, MayWriteInPlaceAndLeavesTheGapsBetweenRows) {
  ISTHMUS_REQUIRE_DEVICE();
  const RmsNormVariant& variant = GetParam();
  TestDevice device;
  if (!CanRunHere(variant, device.exec())) GTEST_SKIP() << "another architecture's";
  HostCase c(3, 300, true, Arithmetic::kReference);
  const std::vector<float> expected = c.Run(RmsNorm);
  const DeviceCopy<float> x(c.x);
  const DeviceCopy<float> weight(c.weight);
  const RmsNormArgs args = c.Args(x.data(), weight.data(), x.data(), c.stride);
  if (variant.supports != nullptr && !variant.supports(args)) GTEST_SKIP() << "not its shape";
  ASSERT_TRUE(variant.launch(args, device.exec()).ok());
  device.Finish();
  const std::vector<float> got = x.ToHost();
  for (size_t i = 0; i < got.size(); ++i) {
    const size_t t = i / static_cast<size_t>(c.stride);
    const size_t d = i % static_cast<size_t>(c.stride);
    if (d >= 300) {
      EXPECT_EQ(got[i], c.x[i]) << t << ", " << d;
    } else if (variant.patch == nullptr) {
      EXPECT_EQ(got[i], expected[t * 300 + d]) << t << ", " << d;
    }
  }
}

TEST_P(RmsNormCudaTest, TakesNoTokens) {
  const RmsNormArgs args = {
      .x = F32Matrix(nullptr, 0, 16), .weight = {}, .out = F32Matrix(nullptr, 0, 16)};
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  EXPECT_TRUE(GetParam().launch(args, device.exec()).ok());
}

INSTANTIATE_TEST_SUITE_P(Table, RmsNormCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(RmsNormVariants())),
                         kernels::testing::VariantName<RmsNormVariant>);

}  // namespace
}  // namespace isthmus::kernels
