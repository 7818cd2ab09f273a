// SPDX-License-Identifier: Apache-2.0
// By hand, refusals, every variant within its bound at the model's shapes, golden products.
#include "kernels/linear/linear.h"

#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/core/workspace.h"
#include "kernels/linear/linear_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/golden_file.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/simd_targets.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {
namespace {

using testing::OwnedWeight;
using testing::SameBits;

// ---- By hand.

TEST(LinearTest, DefinitionAndCpuMatchAProductByHand) {
  float x[] = {1.0f, 2.0f, 3.0f};
  const float weight[] = {1.0f, 0.0f, -1.0f, 0.5f, 0.25f, 2.0f};
  WeightView w;
  w.rows = 2;
  w.cols = 3;
  w.elements = weight;
  for (const auto& run : {Linear, LinearDefinition}) {
    float out[2] = {};
    ASSERT_TRUE(
        run({.x = F32Matrix(x, 1, 3), .weight = w, .out = F32Matrix(out, 1, 2)}, Exec{}).ok());
    EXPECT_EQ(out[0], -2.0f);  // 1 - 3
    EXPECT_EQ(out[1], 7.0f);   // 0.5 + 0.5 + 6
  }
}

TEST(LinearTest, QuantisesTheInputAndRoundsTheOutput) {
  // amax 448 gives scale 1. On the e4m3 grid 33 lies between 32 and 36 and becomes 32.
  float x[128] = {448.0f, 33.0f};
  std::vector<float> ones(128, 1.0f);
  WeightView w;
  w.rows = 1;
  w.cols = 128;
  w.elements = ones.data();
  for (const auto& run : {Linear, LinearDefinition}) {
    float out = 0.0f;
    LinearArgs args = {.x = F32Matrix(x, 1, 128), .weight = w, .out = F32Matrix(&out, 1, 1)};
    ASSERT_TRUE(run(args, Exec{}).ok());
    EXPECT_EQ(out, 481.0f);
    args.quantise_input = true;
    ASSERT_TRUE(run(args, Exec{}).ok());
    EXPECT_EQ(out, 480.0f);
    args.quantise_input = false;
    args.round_output = true;
    ASSERT_TRUE(run(args, Exec{}).ok());
    EXPECT_EQ(out, 480.0f);  // bf16 steps by 2 there; 481 is a tie and goes to the even 480.
  }
}

TEST(LinearTest, ReadsFp4PairsWithTheEvenKInTheLowNibble) {
  std::vector<uint8_t> elements(16, 0);
  elements[0] = 0x72;         // k 0: 1.0, k 1: 6.0
  elements[15] = 0xc0;        // k 31: -2.0
  const uint8_t scale = 128;  // 2
  WeightView w;
  w.format = WeightFormat::kMxfp4;
  w.rows = 1;
  w.cols = 32;
  w.elements = elements.data();
  w.scales = &scale;
  std::vector<float> x(32, 0.0f);
  x[0] = 1.0f;
  x[1] = 10.0f;
  x[31] = 100.0f;
  for (const auto& run : {Linear, LinearDefinition}) {
    float out = 0.0f;
    ASSERT_TRUE(
        run({.x = F32Matrix(x.data(), 1, 32), .weight = w, .out = F32Matrix(&out, 1, 1)}, Exec{})
            .ok());
    EXPECT_EQ(out, 2.0f * (1.0f + 60.0f - 200.0f));
  }
}

TEST(LinearTest, QuantiseActivationOnceGivesTheBitsOfQuantisingInside) {
  const OwnedWeight w = testing::RandomWeight(1, WeightFormat::kFp8Block128, 48, 384);
  for (const int64_t tokens : {1, 11}) {
    std::vector<float> x = testing::OutlierValues(2, tokens * 384);
    std::vector<float> q(x.size());
    std::vector<float> inside(size_t(tokens * 48));
    std::vector<float> outside(size_t(tokens * 48));
    const MatrixView in = F32Matrix(x.data(), tokens, 384);
    const MatrixView quantised = F32Matrix(q.data(), tokens, 384);
    ASSERT_TRUE(QuantiseActivation(in, quantised, Exec{}).ok());
    ASSERT_TRUE(Linear({.x = in,
                        .weight = w.view,
                        .out = F32Matrix(inside.data(), tokens, 48),
                        .quantise_input = true},
                       Exec{})
                    .ok());
    ASSERT_TRUE(
        Linear({.x = quantised, .weight = w.view, .out = F32Matrix(outside.data(), tokens, 48)},
               Exec{})
            .ok());
    EXPECT_TRUE(SameBits(inside, outside));
    ASSERT_TRUE(QuantiseActivation(in, in, Exec{}).ok());  // In place.
    EXPECT_TRUE(SameBits(x, q));
  }
}

// ---- Refusals.

class LinearRefusalTest : public ::testing::Test {
 protected:
  LinearRefusalTest() : weight_(testing::RandomWeight(1, WeightFormat::kMxfp4, 8, 64)) {
    args_ = {.x = F32Matrix(x_, 2, 64), .weight = weight_.view, .out = F32Matrix(out_, 2, 8)};
  }
  void ExpectRefused(const std::string& part) {
    const absl::Status status = Linear(args_, Exec{});
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(std::string(status.message()).find(part), std::string::npos) << status;
  }
  float x_[256] = {};
  float out_[64] = {};
  OwnedWeight weight_;
  LinearArgs args_;
};

TEST_F(LinearRefusalTest, AcceptsTheUnchangedArguments) { EXPECT_TRUE(Linear(args_, Exec{}).ok()); }
TEST_F(LinearRefusalTest, AnotherK) {
  args_.x = F32Matrix(x_, 2, 32);
  ExpectRefused("x has K 32, weight has K 64");
}
TEST_F(LinearRefusalTest, AnotherOutputShape) {
  args_.out = F32Matrix(out_, 2, 7);
  ExpectRefused("out is [2, 7], expected [2, 8]");
}
TEST_F(LinearRefusalTest, AnotherNumberOfTokens) {
  args_.out = F32Matrix(out_, 3, 8);
  ExpectRefused("out is [3, 8], expected [2, 8]");
}
TEST_F(LinearRefusalTest, AnotherType) {
  args_.x.dtype = DType::kBf16;
  ExpectRefused("x has type 2");
}
TEST_F(LinearRefusalTest, RowsThatOverlap) {
  args_.x.row_stride = 63;
  ExpectRefused("row stride 63");
}
TEST_F(LinearRefusalTest, Fp4ThatDoesNotFillItsGroups) {
  args_.weight.cols = 48;
  ExpectRefused("K 48, not a multiple of its group 32");
}
TEST_F(LinearRefusalTest, AShareThatBeginsInsideAnFp4Group) {
  args_.weight.first_col = 32;
  ExpectRefused("begins at column 32 of a scale block, must be 0");
}
TEST_F(LinearRefusalTest, AWeightWithoutScales) {
  args_.weight.scales = nullptr;
  ExpectRefused("lacks elements or scales");
}
TEST_F(LinearRefusalTest, AnOutputOverItsInput) {
  args_.out = F32Matrix(x_ + 100, 2, 8);
  ExpectRefused("overlaps");
}
TEST_F(LinearRefusalTest, ACastOfAnotherFormat) {
  args_.weight.is_mxfp4_cast = true;
  ExpectRefused("cast");
}
TEST_F(LinearRefusalTest, NoVariantForAnUnknownArchitecture) {
  Exec exec;
  exec.arch = 1;
  EXPECT_EQ(Linear(args_, exec).code(), absl::StatusCode::kUnimplemented);
}
TEST(LinearTest, TakesTwoColumnSlicesOfOneMatrix) {
  const OwnedWeight w = testing::RandomWeight(1, WeightFormat::kF32, 8, 64);
  std::vector<float> wide(4 * 72, 1.0f);
  const MatrixView all = F32Matrix(wide.data(), 4, 72);
  EXPECT_TRUE(
      Linear({.x = all.Columns(0, 64), .weight = w.view, .out = all.Columns(64, 8)}, Exec{}).ok());
  EXPECT_FALSE(
      Linear({.x = all.Columns(0, 64), .weight = w.view, .out = all.Columns(63, 8)}, Exec{}).ok());
}

// ---- Bounds.

struct BoundCase {
  const char* name;
  WeightFormat format;
  int64_t tokens, cols, rows;
};
void PrintTo(const BoundCase& c, std::ostream* out) { *out << c.name; }

// The loops of the definition with f32 sums: the yardstick.
void NaiveLinear(const LinearArgs& args, const std::vector<int64_t>& outputs, float* out) {
  const int64_t cols = args.x.cols;
  std::vector<float> x(static_cast<size_t>(args.x.rows * cols));
  const MatrixView q = F32Matrix(x.data(), args.x.rows, cols);
  for (int64_t t = 0; t < args.x.rows; ++t) std::copy_n(args.x.f32(t), cols, q.f32(t));
  if (args.quantise_input) {
    ASSERT_TRUE(QuantiseActivation(q, q, Exec{}).ok());
  }
  for (int64_t t = 0; t < args.x.rows; ++t) {
    for (const int64_t n : outputs) {
      float sum = 0.0f;
      for (int64_t k = 0; k < cols; ++k) {
        sum += q.f32(t)[k] * static_cast<float>(WeightValue(args.weight, n, k));
      }
      *out++ = args.round_output ? RoundBf16(sum) : sum;
    }
  }
}

class LinearVariantTest : public ::testing::TestWithParam<std::tuple<LinearVariant, BoundCase>> {};

TEST_P(LinearVariantTest, StaysWithinItsBound) {
  const auto& [variant, c] = GetParam();
  const OwnedWeight stored = testing::RandomWeight(7, c.format, c.rows, c.cols);
  const OwnedWeight weight = testing::Packed(stored.view);
  std::vector<float> x = testing::OutlierValues(8, c.tokens * c.cols);
  // A sample of the outputs keeps the definition affordable at the real shapes.
  std::vector<int64_t> outputs;
  for (int64_t n = 0; n < c.rows; n += std::max<int64_t>(1, c.rows / 61)) outputs.push_back(n);
  outputs.push_back(c.rows - 1);
  for (const bool round : {false, true}) {
    testing::GuardedFloats out(c.tokens * c.rows);
    LinearArgs args = {.x = F32Matrix(x.data(), c.tokens, c.cols),
                       .weight = weight.view,
                       .out = F32Matrix(out.data(), c.tokens, c.rows),
                       .quantise_input = QuantisesInput(c.format),
                       .round_output = round};
    ASSERT_TRUE(variant.launch(args, Exec{}).ok());
    EXPECT_TRUE(out.Intact());

    std::vector<float> got;
    std::vector<float> exact(static_cast<size_t>(c.tokens) * outputs.size());
    std::vector<float> naive(exact.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      std::vector<float> column(static_cast<size_t>(c.tokens));
      LinearArgs one = args;
      one.weight = RowSlice(stored.view, outputs[i], 1);
      one.out = F32Matrix(column.data(), c.tokens, 1);
      ASSERT_TRUE(LinearDefinition(one, Exec{}).ok());
      for (size_t t = 0; t < column.size(); ++t) exact[t * outputs.size() + i] = column[t];
    }
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (const int64_t n : outputs) got.push_back(out.values()[size_t(t * c.rows + n)]);
    }
    NaiveLinear(args, outputs, naive.data());
    const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    if (round) {
      EXPECT_TRUE(testing::Bf16FlipsWithin(got, naive, exact));
    } else {
      EXPECT_TRUE(testing::WithinBound(got, naive, exact, bound));
    }
  }
}

constexpr BoundCase kBoundCases[] = {
    {"f32_hc_fn", WeightFormat::kF32, 2, 16384, 24},
    {"bf16_gate", WeightFormat::kBf16, 3, 4096, 256},
    {"fp8_wq_a", WeightFormat::kFp8Block128, 5, 4096, 1024},
    {"fp8_wo_b", WeightFormat::kFp8Block128, 2, 8192, 4096},
    {"mxfp4_w1", WeightFormat::kMxfp4, 2, 4096, 2048},
    {"nvfp4_w1", WeightFormat::kNvfp4, 2, 4096, 2048},
    {"nvfp4_w2", WeightFormat::kNvfp4, 7, 2048, 4096},
    {"fp8_small", WeightFormat::kFp8Block128, 9, 160, 40},
};
std::string BoundCaseName(
    const ::testing::TestParamInfo<std::tuple<LinearVariant, BoundCase>>& info) {
  const auto& [variant, c] = info.param;
  return std::string(variant.patch == nullptr ? "trusted_" : "patch_") + c.name;
}
INSTANTIATE_TEST_SUITE_P(
    Table, LinearVariantTest,
    ::testing::Combine(::testing::ValuesIn(testing::CpuVariants(LinearVariants())),
                       ::testing::ValuesIn(kBoundCases)),
    BoundCaseName);

// Two output groups of 64 rows share one block of 128 scale rows: the second group must not read
// the block after it.
TEST(LinearTest, GroupsOfRowsShareAScaleBlock) {
  OwnedWeight w = testing::RandomWeight(3, WeightFormat::kFp8Block128, 256, 128);
  w.scales[0] = 127;
  w.scales[1] = 135;  // 256 times larger, so that a wrong block cannot be missed.
  for (const int64_t tokens : {1, 6}) {
    std::vector<float> x = testing::NormalValues(4, tokens * 128);
    for (int64_t group = 0; group < 4; ++group) {
      LinearArgs args;
      args.x = F32Matrix(x.data(), tokens, 128);
      args.weight = RowSlice(w.view, group * 64, 64);
      std::vector<float> got(size_t(tokens * 64));
      std::vector<float> exact(got.size());
      args.out = F32Matrix(got.data(), tokens, 64);
      ASSERT_TRUE(Linear(args, Exec{}).ok());
      args.out = F32Matrix(exact.data(), tokens, 64);
      ASSERT_TRUE(LinearDefinition(args, Exec{}).ok());
      EXPECT_TRUE(testing::WithinRelativeL2(got, exact, 1e-6)) << group;
      float largest = 0.0f;
      for (const float v : got) largest = std::max(largest, std::fabs(v));
      EXPECT_EQ(largest > 10000.0f, group >= 2) << group << ": " << largest;
    }
  }
}

// ---- Golden products. Their activations carry scales that are no powers of two, so the products
// with those scales are the input.

std::vector<uint8_t> Ue8m0Codes(const std::vector<float>& scales) {
  std::vector<uint8_t> out;
  for (const float s : scales) {
    out.push_back(static_cast<uint8_t>(CeilLog2(s) + 127));
    EXPECT_EQ(Ue8m0Value(out.back()), s);
  }
  return out;
}

std::vector<float> Dequantised(const testing::GoldenArray& codes, const std::vector<float>& scales,
                               int64_t group) {
  std::vector<float> x = codes.F32();
  for (size_t i = 0; i < x.size(); ++i) x[i] *= scales[i / static_cast<size_t>(group)];
  return x;
}

class LinearTargetTest : public testing::SimdTargetTest {};
ISTHMUS_INSTANTIATE_SIMD_TARGETS(LinearTargetTest);

void ExpectGoldenProduct(const testing::GoldenFile& file, WeightFormat format,
                         absl::string_view elements) {
  const std::vector<int64_t> dims = file.dims();  // M, N, K
  std::vector<float> x = Dequantised(file.at("A_fp8"), file.at("a_s").F32(), 128);
  const std::vector<uint8_t> scales = Ue8m0Codes(file.at("b_s").F32());
  WeightView w;
  w.format = format;
  w.rows = dims[1];
  w.cols = dims[2];
  w.elements = file.at(elements).u8();
  w.scales = scales.data();
  std::vector<float> out(static_cast<size_t>(dims[0] * dims[1]));
  ASSERT_TRUE(Linear({.x = F32Matrix(x.data(), dims[0], dims[2]),
                      .weight = w,
                      .out = F32Matrix(out.data(), dims[0], dims[1])},
                     Exec{})
                  .ok());
  EXPECT_TRUE(testing::WithinRelativeL2(out, file.at("C_ref").F32(), 1e-5));
}

TEST_P(LinearTargetTest, MatchesTheGoldenFp8Gemm) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_fp8_gemm.safetensors");
  ExpectGoldenProduct(file, WeightFormat::kFp8Block128, "B_fp8");
}

TEST_P(LinearTargetTest, MatchesTheGoldenFp4Gemm) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_fp4_gemm.safetensors");
  ExpectGoldenProduct(file, WeightFormat::kMxfp4, "B_fp4");
}

TEST_P(LinearTargetTest, MatchesTheGoldenGroupedOutputProjection) {
  ISTHMUS_READ_GOLDEN(file, "unit/unit_ogroup_gemm.safetensors");
  const std::vector<int64_t> dims = file.dims();  // tokens, groups, rank, K
  const int64_t tokens = dims[0], groups = dims[1], rank = dims[2], cols = dims[3];
  std::vector<float> o = file.at("o").F32();
  const OwnedWeight w =
      testing::WeightFrom(WeightFormat::kF32, groups * rank, cols, file.at("wo_a").F32());
  std::vector<float> out(static_cast<size_t>(tokens * groups * rank));
  for (int64_t g = 0; g < groups; ++g) {
    const LinearArgs args = {
        .x = F32Matrix(o.data(), tokens, groups * cols).Columns(g * cols, cols),
        .weight = RowSlice(w.view, g * rank, rank),
        .out = F32Matrix(out.data(), tokens, groups * rank).Columns(g * rank, rank)};
    ASSERT_TRUE(Linear(args, Exec{}).ok());
  }
  EXPECT_TRUE(testing::WithinRelativeL2(out, file.at("out_ref").F32(), 1e-5));
}

}  // namespace
}  // namespace isthmus::kernels
