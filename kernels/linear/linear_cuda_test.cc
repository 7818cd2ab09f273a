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
#include "kernels/core/gemm.h"
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
using kernels::testing::DeviceCopy;
using kernels::testing::DeviceWeight;
using kernels::testing::OwnedWeight;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;

struct ShapeCase {
  WeightFormat format;
  int64_t tokens, rows, cols;  // Tokens, N, K.
  int64_t first_row = 0;
  int64_t first_col = 0;
  bool quantise = false;
  bool is_mxfp4_cast = false;
  bool is_rounded = true;  // x on the bf16 grid.
};
std::ostream& operator<<(std::ostream& out, const ShapeCase& c) {
  return out << "format " << static_cast<int>(c.format) << ", " << c.tokens << " tokens, N "
             << c.rows << " from " << c.first_row << ", K " << c.cols << " from " << c.first_col
             << (c.quantise ? ", quantised" : "");
}

constexpr ShapeCase kSmallCases[] = {
    {.format = WeightFormat::kF32, .tokens = 1, .rows = 24, .cols = 256},
    {.format = WeightFormat::kF32, .tokens = 9, .rows = 17, .cols = 133},
    {.format = WeightFormat::kBf16, .tokens = 1, .rows = 64, .cols = 256},
    {.format = WeightFormat::kBf16, .tokens = 3, .rows = 33, .cols = 200},
    {.format = WeightFormat::kBf16, .tokens = 19, .rows = 48, .cols = 512},
    {.format = WeightFormat::kBf16, .tokens = 2, .rows = 300, .cols = 192, .is_rounded = false},
    {.format = WeightFormat::kBf16, .tokens = 40, .rows = 144, .cols = 256, .is_rounded = false},
    {.format = WeightFormat::kBf16, .tokens = 70, .rows = 32, .cols = 256},
    {.format = WeightFormat::kBf16, .tokens = 130, .rows = 144, .cols = 200, .is_rounded = false},
    {.format = WeightFormat::kFp8Block128, .tokens = 1, .rows = 64, .cols = 512, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 2, .rows = 16, .cols = 128, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 1, .rows = 1, .cols = 1, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 9, .rows = 150, .cols = 160, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 17, .rows = 40, .cols = 384, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 33, .rows = 80, .cols = 256, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 64, .rows = 32, .cols = 256, .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 130,
     .rows = 144,
     .cols = 256,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 70, .rows = 20, .cols = 200, .quantise = true},
    {.format = WeightFormat::kFp8Block128, .tokens = 4, .rows = 64, .cols = 256},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 4,
     .rows = 64,
     .cols = 256,
     .first_row = 64,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 5,
     .rows = 48,
     .cols = 224,
     .first_row = 112,
     .first_col = 32,
     .quantise = true},
    {.format = WeightFormat::kMxfp4, .tokens = 2, .rows = 40, .cols = 96, .quantise = true},
    {.format = WeightFormat::kNvfp4, .tokens = 3, .rows = 16, .cols = 80, .quantise = true},
    {.format = WeightFormat::kNvfp4,
     .tokens = 5,
     .rows = 20,
     .cols = 128,
     .quantise = true,
     .is_mxfp4_cast = true},
};

// Only on a real device: the projections of the model (and what a GPU's split sees).
constexpr ShapeCase kRealCases[] = {
    {.format = WeightFormat::kFp8Block128,
     .tokens = 1,
     .rows = 32768,
     .cols = 1024,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 8,
     .rows = 4096,
     .cols = 8192,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 64,
     .rows = 1536,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 300,
     .rows = 4096,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kFp8Block128,
     .tokens = 2048,
     .rows = 1024,
     .cols = 4096,
     .quantise = true},
    {.format = WeightFormat::kBf16, .tokens = 8, .rows = 256, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 64, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 200, .rows = 1024, .cols = 4096},
    {.format = WeightFormat::kBf16, .tokens = 1, .rows = 16160, .cols = 4096},
};

// The operands on the host; x lies in rows of K + 3, out in rows of N + 5.
struct HostCase {
  explicit HostCase(const ShapeCase& shape_in) : shape(shape_in) {
    const ShapeCase& c = shape;
    whole = kernels::testing::RandomWeight(7, c.format, c.first_row + c.rows, c.cols);
    if (c.first_col != 0) {  // One column of scale blocks more than the columns need.
      const int64_t blocks = (c.first_row + c.rows + 127) / 128;
      whole.scales.assign(static_cast<size_t>(blocks * ((c.first_col + c.cols + 127) / 128)), 0);
      for (size_t i = 0; i < whole.scales.size(); ++i) {
        whole.scales[i] = static_cast<uint8_t>(118 + i % 5);
      }
      whole.view.scales = whole.scales.data();
      whole.view.first_col = c.first_col;
    }
    if (c.is_mxfp4_cast) {  // Pairs of equal powers of two.
      for (size_t i = 0; i < whole.scales.size(); ++i) {
        whole.scales[i] = static_cast<uint8_t>((5 + i / 2 % 4) << 3);
      }
      whole.view.is_mxfp4_cast = true;
    }
    weight = RowSlice(whole.view, c.first_row, c.rows);
    x = kernels::testing::OutlierValues(8, c.tokens * x_stride());
    for (float& value : x) value = c.is_rounded ? RoundBf16(value) : value;
  }
  int64_t x_stride() const { return shape.cols + 3; }
  int64_t out_stride() const { return shape.rows + 5; }

  LinearArgs Args(const float* in, const WeightView& w, float* out, int64_t stride) const {
    return {.x = {const_cast<float*>(in), DType::kF32, shape.tokens, shape.cols, x_stride()},
            .weight = w,
            .out = {out, DType::kF32, shape.tokens, shape.rows, stride},
            .quantise_input = shape.quantise};
  }
  std::vector<float> Run(absl::Status (*operation)(const LinearArgs&, const Exec&),
                         bool round) const {
    std::vector<float> out(static_cast<size_t>(shape.tokens * shape.rows));
    LinearArgs args = Args(x.data(), weight, out.data(), shape.rows);
    args.round_output = round;
    const absl::Status status = operation(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
  // The definition's loops with f32 sums, for the outputs [begin, end) of all tokens.
  std::vector<float> Naive() const {
    std::vector<float> q(x.size());
    const MatrixView in = Args(x.data(), weight, nullptr, 0).x;
    const MatrixView quantised = {q.data(), DType::kF32, in.rows, in.cols, in.row_stride};
    if (shape.quantise) {
      EXPECT_TRUE(QuantiseActivation(in, quantised, Exec{}).ok());
    } else {
      q = x;
    }
    std::vector<float> out;
    std::vector<float> decoded(static_cast<size_t>(shape.rows * shape.cols));
    for (int64_t n = 0; n < shape.rows; ++n) {
      for (int64_t k = 0; k < shape.cols; ++k) {
        decoded[static_cast<size_t>(n * shape.cols + k)] =
            static_cast<float>(WeightValue(weight, n, k));
      }
    }
    for (int64_t t = 0; t < shape.tokens; ++t) {
      for (int64_t n = 0; n < shape.rows; ++n) {
        const float* w = decoded.data() + n * shape.cols;
        float sum = 0.0f;
        for (int64_t k = 0; k < shape.cols; ++k) sum += quantised.f32(t)[k] * w[k];
        out.push_back(sum);
      }
    }
    return out;
  }

  ShapeCase shape;
  OwnedWeight whole;
  WeightView weight;
  std::vector<float> x;
};

// The [tokens, N] inside rows of `stride`; what lies between the rows must be NaN as before.
std::vector<float> Dense(const std::vector<float>& wide, const ShapeCase& c, int64_t stride) {
  std::vector<float> out;
  for (int64_t t = 0; t < c.tokens; ++t) {
    for (int64_t n = 0; n < stride; ++n) {
      const float value = wide[static_cast<size_t>(t * stride + n)];
      if (n < c.rows) {
        out.push_back(value);
      } else {
        EXPECT_TRUE(std::isnan(value)) << "a write at " << t << ", " << n;
      }
    }
  }
  return out;
}

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
  void Check(const ShapeCase& shape, TestDevice& device) {
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
  for (const ShapeCase& shape : kSmallCases) Check(shape, device);
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
  for (const WeightFormat format : {WeightFormat::kFp8Block128, WeightFormat::kBf16}) {
    const HostCase c({.format = format,
                      .tokens = 12,
                      .rows = 280,
                      .cols = 640,
                      .quantise = format == WeightFormat::kFp8Block128});
    const std::vector<float> forward = RunHere(c, device, false);
    const emulator::ReverseOrder reverse;
    EXPECT_TRUE(SameBits(RunHere(c, device, false), forward));
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
  if (!IsRealDevice()) GTEST_SKIP() << "too large to emulate";
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  for (const ShapeCase& shape : kRealCases) {
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
  for (const bool is_on : {false, true}) {
    device.exec().patches = is_on ? &patches : nullptr;
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
