// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of linear within its bound, for every format, layout and odd shape; the
// trusted one bit for bit the CPU's.
#include <algorithm>
#include <limits>
#include <memory>
#include <ostream>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/linear/linear_cuda_cases.h"
#include "kernels/linear/linear_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif

namespace isthmus::kernels {

void PrintTo(const LinearVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::Dense;
using kernels::testing::DeviceCopy;
using kernels::testing::DeviceWeight;
using kernels::testing::HostCase;
using kernels::testing::SameBits;
using kernels::testing::ShapeCase;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;

class LinearCudaTest : public ::testing::TestWithParam<LinearVariant> {
 protected:
  // Runs the variant on the device; empty when it does not take these arguments.
  std::vector<float> RunHere(const HostCase& c, TestDevice& device, bool round) {
    return RunHere(c, device, round, GetParam());
  }
  static std::vector<float> RunHere(const HostCase& c, TestDevice& device, bool round,
                                    const LinearVariant& variant) {
    const DeviceWeight weight(c.weight);
    const DeviceCopy<float> x(c.x);
    const DeviceCopy<float> out(c.shape.tokens * c.out_stride());
    LinearArgs args = c.Args(x.data(), weight.view(), out.data(), c.out_stride());
    args.round_output = round;
    if (variant.supports != nullptr && !variant.supports(args)) return {};
    const absl::Status status = variant.launch(args, device.exec());
    EXPECT_TRUE(status.ok()) << status;
    device.Finish();
    EXPECT_TRUE(out.Intact());
    const std::vector<float> wide = out.ToHost();
    EXPECT_TRUE(variant.launch(args, device.exec()).ok());
    device.Finish();
    EXPECT_TRUE(SameBits(out.ToHost(), wide)) << "two runs differ";
    return Dense(wide, c.shape, c.out_stride());
  }
  // Alone and as one of a batch whose rows have the bits that they have alone.
  void Check(const ShapeCase& shape, TestDevice& device) {
    CheckOnce(shape, device);
    if (shape.tokens > kSwapAbTokens || GetParam().patch == nullptr) return;
    device.exec().batch_invariant = true;
    CheckOnce(shape, device);
    device.exec().batch_invariant = false;
  }
  void CheckOnce(const ShapeCase& shape, TestDevice& device) {
    const HostCase c(shape);
    const std::vector<float> got = RunHere(c, device, false);
    if (got.empty()) return;
    ++taken_;
    const LinearVariant& variant = GetParam();
    if (variant.patch == nullptr) {
      EXPECT_TRUE(SameBits(got, c.Run(Linear, false))) << shape;
    }
    const std::vector<float> exact = c.Run(LinearDefinition, false);
    NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
    // The emulator adds in f64 what tensor cores add in fewer bits.
    if (variant.patch != nullptr && !IsRealDevice()) bound.floor = 1e-5;
    EXPECT_TRUE(WithinBound(got, c.Naive(), exact, bound)) << shape;
    // Rounding is that of the result.
    std::vector<float> rounded = got;
    for (float& value : rounded) value = RoundBf16(value);
    EXPECT_TRUE(SameBits(RunHere(c, device, true), rounded)) << shape;
  }
  int taken_ = 0;
};

TEST_P(LinearCudaTest, StaysWithinItsBoundAtTinyAndOddShapes) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  for (const ShapeCase& shape : kernels::testing::kSmallLinears) Check(shape, device);
  EXPECT_GT(taken_, 0);
}

// Few multiprocessors have long shares, which wrap around rings; odd numbers cut rows anywhere.
TEST_P(LinearCudaTest, StaysWithinItsBoundOnAnyNumberOfMultiprocessors) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  for (const int sms : {1, 3}) {
    device.exec().num_sms = sms;
    Check({.format = WeightFormat::kFp8Block128,
           .tokens = 10,
           .rows = 150,
           .cols = 1000,
           .quantise = true},
          device);
    Check({.format = WeightFormat::kBf16, .tokens = 34, .rows = 130, .cols = 650}, device);
    Check({.format = WeightFormat::kFp8Block128,
           .tokens = 130,
           .rows = 140,
           .cols = 300,
           .quantise = true},
          device);
    Check({.format = WeightFormat::kFp8Block128, .tokens = 6, .rows = 150, .cols = 900}, device);
    Check({.format = WeightFormat::kFp8Block128, .tokens = 66, .rows = 100, .cols = 520}, device);
    Check({.format = WeightFormat::kBf16, .tokens = 66, .rows = 100, .cols = 300}, device);
    Check(
        {.format = WeightFormat::kBf16, .tokens = 5, .rows = 260, .cols = 500, .is_rounded = false},
        device);
  }
}

// Lanes and warps in the other order: what a missing barrier would change.
TEST_P(LinearCudaTest, DoesNotDependOnTheOrderOfThreads) {
#if ISTHMUS_EMULATED
  TestDevice device;
  device.exec().num_sms = 3;
  for (const ShapeCase& shape : {
           ShapeCase{.format = WeightFormat::kFp8Block128,
          .tokens = 12,
          .rows = 280,
          .cols = 640,
          .quantise = true},
           ShapeCase{.format = WeightFormat::kBf16, .tokens = 3, .rows = 280, .cols = 640},
           ShapeCase{.format = WeightFormat::kFp8Block128, .tokens = 8, .rows = 90, .cols = 1300},
           ShapeCase{.format = WeightFormat::kFp8Block128, .tokens = 66, .rows = 40, .cols = 500},
           ShapeCase{.format = WeightFormat::kBf16, .tokens = 66, .rows = 40, .cols = 300},
       }) {
    const HostCase c(shape);
    for (const bool is_invariant : {false, true}) {  // Another kernel where tokens are few.
      device.exec().batch_invariant = is_invariant;
      const std::vector<float> forward = RunHere(c, device, false);
      const emulator::ReverseOrder reverse;
      EXPECT_TRUE(SameBits(RunHere(c, device, false), forward));
    }
  }
#else
  GTEST_SKIP() << "the emulator's order";
#endif
}

TEST_P(LinearCudaTest, GivesTheBitsOfARowAloneWhenBatchInvariant) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  device.exec().batch_invariant = true;
  const ShapeCase shape = {.format = WeightFormat::kFp8Block128,
                           .tokens = 75,
                           .rows = 48,
                           .cols = 640,
                           .quantise = true};
  const HostCase c(shape);
  // Whatever the table chooses for each number of tokens.
  const auto run = [&](const HostCase& some) {
    for (const LinearVariant& variant : LinearVariants()) {
      if (!CanRunHere(variant, device.exec()) ||
          (variant.patch == nullptr) != (GetParam().patch == nullptr)) {
        continue;
      }
      std::vector<float> out = RunHere(some, device, false, variant);
      if (!out.empty()) return out;
    }
    return std::vector<float>();
  };
  const std::vector<float> all = run(c);
  ASSERT_FALSE(all.empty());
  for (const int64_t t : {0, 7, 74}) {
    ShapeCase one = shape;
    one.tokens = 1;
    HostCase alone(one);
    std::copy_n(c.x.begin() + t * c.x_stride(), c.x_stride(), alone.x.begin());
    EXPECT_TRUE(SameBits(run(alone), std::span(all).subspan(static_cast<size_t>(t * 48), 48))) << t;
  }
}

TEST_P(LinearCudaTest, TakesNoTokens) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  LinearArgs args;
  args.x = F32Matrix(nullptr, 0, 32);
  args.out = F32Matrix(nullptr, 0, 16);
  args.weight.rows = 16;
  args.weight.cols = 32;
  EXPECT_TRUE(GetParam().launch(args, device.exec()).ok());
}

TEST_P(LinearCudaTest, StaysWithinItsBoundAtTheModelsShapes) {
  ISTHMUS_REQUIRE_DEVICE();
  if (!testing::TestsRealShapes()) GTEST_SKIP() << "too large to emulate";
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  for (const ShapeCase& shape : kernels::testing::kRealLinears) {
    LinearArgs probe;  // Whether the variant takes it, before a large weight is made.
    probe.x.rows = shape.tokens;
    probe.weight.format = shape.format;
    probe.weight.layout = WeightLayout::kMmaTiles;
    probe.weight.rows = shape.rows;
    probe.weight.cols = shape.cols;
    probe.quantise_input = shape.quantise;
    if (GetParam().supports != nullptr && !GetParam().supports(probe)) continue;
    const HostCase c(shape);
    const std::vector<float> got = RunHere(c, device, false);
    if (got.empty()) continue;
    if (GetParam().patch == nullptr) {
      EXPECT_TRUE(SameBits(got, c.Run(Linear, false))) << shape;
      continue;
    }
    // The definition would take minutes; the CPU path adds f32 numbers in another order.
    EXPECT_TRUE(kernels::testing::WithinRelativeL2(got, c.Run(Linear, false), 3e-3)) << shape;
  }
}

INSTANTIATE_TEST_SUITE_P(Table, LinearCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(LinearVariants())),
                         kernels::testing::VariantName<LinearVariant>);

// ---- What has no table.

// Two sets of linears in one call: shares of one input, and groups with an input each.
TEST(LinearManyCudaTest, GivesWhatLinearGivesOneByOne) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  const PatchSet patches = PatchSet::Resolve(LinearPatches(), {{"linear.swap_ab", true}}).value();
  std::vector<std::unique_ptr<HostCase>> cases;
  for (const int64_t rows : {150, 16, 33}) {
    cases.push_back(std::make_unique<HostCase>(ShapeCase{.format = WeightFormat::kFp8Block128,
                                                         .tokens = 9,
                                                         .rows = rows,
                                                         .cols = 384,
                                                         .quantise = true}));
  }
  cases.push_back(std::make_unique<HostCase>(
      ShapeCase{.format = WeightFormat::kBf16, .tokens = 9, .rows = 40, .cols = 128}));
  for (const int run : {0, 1, 2}) {  // Trusted; swap_ab's kernel for few tokens, and that for more.
    device.exec().patches = run > 0 ? &patches : nullptr;
    device.exec().batch_invariant = run == 2;
    const DeviceCopy<float> shared(cases[0]->x);
    std::vector<std::unique_ptr<DeviceWeight>> weights;
    std::vector<std::unique_ptr<DeviceCopy<float>>> inputs;
    std::vector<std::unique_ptr<DeviceCopy<float>>> outputs;
    std::vector<LinearArgs> linears;
    for (size_t i = 0; i < cases.size(); ++i) {
      const HostCase& c = *cases[i];
      weights.push_back(std::make_unique<DeviceWeight>(c.weight));
      inputs.push_back(std::make_unique<DeviceCopy<float>>(c.x));
      outputs.push_back(std::make_unique<DeviceCopy<float>>(c.shape.tokens * c.out_stride()));
      // The first two read one input.
      const float* x = i == 1 ? inputs[0]->data() : inputs[i]->data();
      linears.push_back(c.Args(x, weights[i]->view(), outputs[i]->data(), c.out_stride()));
    }
    ASSERT_TRUE(LinearMany(linears, device.exec()).ok());
    device.Finish();
    for (size_t i = 0; i < cases.size(); ++i) {
      HostCase& c = *cases[i];
      if (i == 1) c.x = cases[0]->x;
      const std::vector<float> got = Dense(outputs[i]->ToHost(), c.shape, c.out_stride());
      EXPECT_TRUE(outputs[i]->Intact());
      EXPECT_TRUE(kernels::testing::WithinRelativeL2(got, c.Run(LinearDefinition, false),
                                                     IsRealDevice() ? 1e-3 : 1e-5))
          << i;
    }
  }
}

// linear.two_formats: the bits of each linear alone, more lines and fewer than there are blocks.
TEST(LinearManyCudaTest, TwoFormatsInOneLaunchHaveTheBitsOfEach) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device(kPhaseDecode);
  const PatchSet patches =
      PatchSet::Resolve(LinearPatches(), {{"linear.swap_ab", true}, {"linear.two_formats", true}})
          .value();
  device.exec().patches = &patches;
  struct Mix {
    int64_t tokens;
    std::vector<int64_t> fp8_rows, bf16_rows;
  };
  for (const Mix& mix : {Mix{1, {16}, {16}}, {3, {150, 33}, {40, 64, 5}}, {8, {16}, {300}}}) {
    std::vector<std::unique_ptr<HostCase>> cases;
    const auto add = [&](WeightFormat format, int64_t rows) {
      cases.push_back(
          std::make_unique<HostCase>(ShapeCase{.format = format,
                                               .tokens = mix.tokens,
                                               .rows = rows,
                                               .cols = 384,
                                               .quantise = format != WeightFormat::kBf16}));
    };
    for (const int64_t rows : mix.fp8_rows) add(WeightFormat::kFp8Block128, rows);
    for (const int64_t rows : mix.bf16_rows) add(WeightFormat::kBf16, rows);
    const DeviceCopy<float> x(cases[0]->x);
    std::vector<std::unique_ptr<DeviceWeight>> weights;
    std::vector<std::unique_ptr<DeviceCopy<float>>> alone, together;
    std::vector<LinearArgs> linears;
    for (const std::unique_ptr<HostCase>& c : cases) {
      weights.push_back(std::make_unique<DeviceWeight>(c->weight));
      const int64_t size = c->shape.tokens * c->out_stride();
      alone.push_back(std::make_unique<DeviceCopy<float>>(size));
      together.push_back(std::make_unique<DeviceCopy<float>>(size));
      const WeightView& weight = weights.back()->view();
      const LinearArgs one = c->Args(x.data(), weight, alone.back()->data(), c->out_stride());
      ASSERT_TRUE(Linear(one, device.exec()).ok());
      linears.push_back(one);
      linears.back().out.data = together.back()->data();
    }
    ASSERT_TRUE(LinearMany(linears, device.exec()).ok());
    device.Finish();
    for (size_t i = 0; i < cases.size(); ++i) {
      EXPECT_TRUE(kernels::testing::SameBits(together[i]->ToHost(), alone[i]->ToHost())) << i;
      EXPECT_TRUE(together[i]->Intact()) << i;
    }
  }
}

TEST(LinearManyCudaTest, TilesTakeTheLargestProjectionOfAPrefillChunk) {
  LinearArgs args;
  args.x.rows = 8192;
  args.weight.format = WeightFormat::kFp8Block128;
  args.weight.layout = WeightLayout::kMmaTiles;
  args.weight.rows = 32768;
  args.weight.cols = 1024;
  args.quantise_input = true;
  EXPECT_TRUE(FitsTilesLarge(args));
  EXPECT_FALSE(FitsSwapAb(args));
  args.weight.first_col = 32;
  EXPECT_FALSE(FitsTilesLarge(args));
}

// A linear that takes the codes of an input quantised before gives the same bits.
TEST(LinearManyCudaTest, TakesAnInputThatWasQuantisedBefore) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  HostCase c({.format = WeightFormat::kFp8Block128,
              .tokens = 3,
              .rows = 48,
              .cols = 300,
              .quantise = true});
  std::vector<std::vector<float>> results;
  for (const bool before : {false, true}) {
    const DeviceWeight weight(c.weight);
    const DeviceCopy<float> x(c.x);
    const DeviceCopy<float> out(c.shape.tokens * c.out_stride());
    LinearArgs args = c.Args(x.data(), weight.view(), out.data(), c.out_stride());
    if (before) {
      ASSERT_TRUE(QuantiseActivation(args.x, args.x, device.exec()).ok());
      args.quantise_input = false;
      args.input_is_quantised = true;
    }
    ASSERT_TRUE(FitsSwapAb(args));
    ASSERT_TRUE(LaunchLinearSwapAb(args, device.exec()).ok());
    device.Finish();
    results.push_back(Dense(out.ToHost(), c.shape, c.out_stride()));
  }
  EXPECT_TRUE(SameBits(results[0], results[1]));
}

TEST(QuantiseActivationCudaTest, GivesTheBitsOfTheCpu) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  for (const int64_t cols : {1, 100, 128, 300, 2100}) {
    std::vector<float> x = kernels::testing::OutlierValues(3, 3 * cols);
    x[0] = std::numeric_limits<float>::quiet_NaN();
    std::vector<float> expected(x.size());
    ASSERT_TRUE(QuantiseActivation(F32Matrix(x.data(), 3, cols),
                                   F32Matrix(expected.data(), 3, cols), Exec{})
                    .ok());
    const DeviceCopy<float> in_place(x);
    const MatrixView view = F32Matrix(in_place.data(), 3, cols);
    ASSERT_TRUE(QuantiseActivation(view, view, device.exec()).ok());
    device.Finish();
    const std::vector<float> got = in_place.ToHost();
    EXPECT_TRUE(in_place.Intact());
    EXPECT_TRUE(std::isnan(got[0]));
    EXPECT_TRUE(SameBits(std::span(got).subspan(1), std::span(expected).subspan(1))) << cols;
  }
}

TEST(TrustedLinearCudaTest, ReadsRowMajorWeightsToo) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  for (const WeightFormat format :
       {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kFp8Block128, WeightFormat::kMxfp4,
        WeightFormat::kNvfp4}) {
    const HostCase c({.format = format, .tokens = 3, .rows = 21, .cols = 160});
    const DeviceWeight weight(c.weight, WeightLayout::kRowMajor);
    const DeviceCopy<float> x(c.x);
    const DeviceCopy<float> out(3 * c.out_stride());
    ASSERT_TRUE(
        LaunchLinearCuda(c.Args(x.data(), weight.view(), out.data(), c.out_stride()), device.exec())
            .ok());
    device.Finish();
    EXPECT_TRUE(SameBits(Dense(out.ToHost(), c.shape, c.out_stride()), c.Run(Linear, false)));
  }
}

}  // namespace
}  // namespace isthmus::kernels
