// SPDX-License-Identifier: Apache-2.0
// Every variant gives the bits of the operations one after another; refusals.
#include "kernels/fused/attention_inputs/head_norm_rope.h"

#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/elementwise/elementwise.h"
#include "kernels/fused/attention_inputs/head_norm_rope_variants.h"
#include "kernels/rms_norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const HeadNormRopeVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;

struct Inputs {
  Inputs(int64_t tokens_in, int64_t heads_in, int64_t head_dim_in, int rope_dim)
      : tokens(tokens_in), heads(heads_in), head_dim(head_dim_in), kv_stride(head_dim_in + 9) {
    q = kernels::testing::OutlierValues(1, tokens * heads * head_dim);
    kv = kernels::testing::OutlierValues(2, tokens * kv_stride);
    for (std::vector<float>* some : {&q, &kv}) {
      for (float& value : *some) value = RoundBf16(value);
    }
    weight = kernels::testing::NormalValues(3, head_dim);
    for (int64_t t = 0; t < tokens; ++t) positions.push_back(t * t * 7919);
    frequency = RopeFrequencies({.rope_dim = rope_dim, .original_positions = 65536});
  }
  HeadNormRopeArgs Args(float* q_data, float* kv_data, const float* kv_weight,
                        std::span<const int64_t> at, std::span<const float> f,
                        Arithmetic arithmetic) const {
    return {.q = F32Matrix(q_data, tokens, heads * head_dim),
            .head_dim = head_dim,
            .kv = {kv_data, DType::kF32, tokens, head_dim, kv_stride},
            .kv_weight = F32Vector(kv_weight, head_dim),
            .positions = at,
            .frequency = f,
            .arithmetic = arithmetic};
  }
  int64_t tokens, heads, head_dim, kv_stride;
  std::vector<float> q, kv, weight, frequency;
  std::vector<int64_t> positions;
};

TEST(HeadNormRopeTest, EveryVariantGivesTheBitsOfTheOperationsInTurn) {
  for (const auto& [tokens, heads, head_dim, rope_dim] :
       {std::tuple{1, 64, 512, 64}, {3, 5, 512, 64}, {2, 8, 128, 64}, {2, 3, 384, 128}}) {
    const Inputs in(tokens, heads, head_dim, rope_dim);
    for (const Arithmetic arithmetic : {Arithmetic::kMath, Arithmetic::kReference}) {
      Inputs cpu = in;
      ASSERT_TRUE(HeadNormRope(cpu.Args(cpu.q.data(), cpu.kv.data(), cpu.weight.data(),
                                        cpu.positions, cpu.frequency, arithmetic),
                               Exec{})
                      .ok());
      if (NumDevices() == 0) continue;
      TestDevice device;
      const DeviceCopy<float> weight(in.weight);
      const DeviceCopy<int64_t> positions(in.positions);
      const DeviceCopy<float> frequency(in.frequency);
      for (const HeadNormRopeVariant& variant : HeadNormRopeVariants()) {
        if (variant.launch == nullptr || !CanRunHere(variant, device.exec())) continue;
        const DeviceCopy<float> q(in.q);
        const DeviceCopy<float> kv(in.kv);
        const HeadNormRopeArgs args =
            in.Args(q.data(), kv.data(), weight.data(), {positions.data(), in.positions.size()},
                    {frequency.data(), in.frequency.size()}, arithmetic);
        if (variant.supports != nullptr && !variant.supports(args)) continue;
        ASSERT_TRUE(variant.launch(args, device.exec()).ok());
        device.Finish();
        EXPECT_TRUE(SameBits(q.ToHost(), cpu.q)) << head_dim;
        EXPECT_TRUE(SameBits(kv.ToHost(), cpu.kv)) << head_dim;
        EXPECT_TRUE(q.Intact());
        EXPECT_TRUE(kv.Intact());
      }
    }
  }
}

TEST(HeadNormRopeTest, IsTheOperationsOneAfterAnother) {
  Inputs fused(3, 4, 128, 64);
  Inputs apart = fused;
  ASSERT_TRUE(HeadNormRope(fused.Args(fused.q.data(), fused.kv.data(), fused.weight.data(),
                                      fused.positions, fused.frequency, Arithmetic::kReference),
                           Exec{})
                  .ok());
  const MatrixView kv = {apart.kv.data(), DType::kF32, 3, 128, apart.kv_stride};
  ASSERT_TRUE(
      RmsNorm({.x = kv, .weight = F32Vector(apart.weight.data(), 128), .out = kv}, Exec{}).ok());
  ASSERT_TRUE(
      Rope({.x = kv, .head_dim = 128, .positions = apart.positions, .frequency = apart.frequency},
           Exec{})
          .ok());
  ASSERT_TRUE(RoundTripKv({.x = kv, .rope_dim = 64}, Exec{}).ok());
  EXPECT_TRUE(SameBits(fused.kv, apart.kv));
}

TEST(HeadNormRopeTest, RefusesShapesThatDoNotFit) {
  Inputs in(2, 4, 128, 64);
  HeadNormRopeArgs args = in.Args(in.q.data(), in.kv.data(), in.weight.data(), in.positions,
                                  in.frequency, Arithmetic::kReference);
  args.kv_weight.size = 64;
  EXPECT_EQ(HeadNormRope(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
  args.kv_weight.size = 128;
  args.q.row_stride = 513;
  EXPECT_EQ(HeadNormRope(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
  args.q.row_stride = 512;
  args.frequency = args.frequency.first(16);
  EXPECT_EQ(HeadNormRope(args, Exec{}).code(), absl::StatusCode::kInvalidArgument);
}

TEST(HeadNormRopeTest, TakesNoTokens) {
  Inputs in(0, 4, 128, 64);
  EXPECT_TRUE(HeadNormRope(in.Args(nullptr, nullptr, in.weight.data(), {}, in.frequency,
                                   Arithmetic::kReference),
                           Exec{})
                  .ok());
}

}  // namespace
}  // namespace isthmus::kernels
