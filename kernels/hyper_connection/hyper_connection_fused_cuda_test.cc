// SPDX-License-Identifier: Apache-2.0
// Patch hyper_connection.fused_pre: gates and x of the fused launch within its bound, and each
// token's bits those that it has alone.
#include <cmath>
#include <span>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/formats.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/hyper_connection/hyper_connection_cases.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/device_matrix.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif

namespace isthmus::kernels {
namespace {

using kernels::testing::Bf16FlipsWithin;
using kernels::testing::DeviceCopy;
using kernels::testing::DeviceMatrix;
using kernels::testing::DeviceWeight;
using kernels::testing::RelativeL2;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;

struct Form {
  const char* name;
  int64_t tokens;
  int64_t hidden;
  DType dtype = DType::kF32;
  int64_t gap = 0;
  bool needs_gpu = false;  // Too slow for the emulator.
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

const Form kForms[] = {
    {"One", 1, 128},
    {"Five", 5, 192, DType::kBf16, 8},
    {"FortyOne", 41, 64, DType::kF32, 4},
    {"Many", 600, 64, DType::kBf16},
    {"Real", 1, 4096, DType::kBf16},
    {"RealMany", 270, 4096, DType::kBf16, 64, true},
};

std::vector<float> Nothing(int64_t count) {
  return std::vector<float>(static_cast<size_t>(count), std::nanf(""));
}
void RoundAll(std::vector<float>& values) {
  for (float& value : values) value = RoundBf16(value);
}

struct Outputs {
  std::vector<float> x, post, comb;
};
void ExpectSame(const Outputs& got, const Outputs& want, const char* what) {
  EXPECT_TRUE(SameBits(got.x, want.x)) << what;
  EXPECT_TRUE(SameBits(got.post, want.post)) << what;
  EXPECT_TRUE(SameBits(got.comb, want.comb)) << what;
}

// The row of the patch: with a launcher, or null in a build without CUDA.
template <typename Variants>
const auto& Fused(const Variants& variants) {
  EXPECT_EQ(variants.front().patch->name, "hyper_connection.fused_pre");
  return variants.front();
}

Outputs RunPre(PreCase& c, const Form& form, bool batch_invariant) {
  TestDevice device;
  device.exec().batch_invariant = batch_invariant;
  const DeviceMatrix streams(c.streams, c.tokens, 4 * c.hidden, form.gap, form.dtype);
  const DeviceMatrix x(Nothing(c.tokens * c.hidden), c.tokens, c.hidden, form.gap, form.dtype);
  const DeviceMatrix post(Nothing(c.tokens * 4), c.tokens, 4);
  const DeviceMatrix comb(Nothing(c.tokens * 16), c.tokens, 16, 4);
  const DeviceWeight fn(c.Fn());
  const DeviceCopy<float> scale(c.scale), base(c.base);
  HyperConnectionPreArgs args = c.Args();
  args.streams = streams.view();
  args.fn = fn.view();
  args.scale.data = scale.data();
  args.base.data = base.data();
  args.x = x.view();
  args.post = post.view();
  args.comb = comb.view();
  const auto& variant = Fused(HyperConnectionPreVariants());
  EXPECT_TRUE(ValidateHyperConnectionPre(args, device.exec().arch).ok());
  EXPECT_TRUE(variant.supports(args));
  const absl::Status status = variant.launch(args, device.exec());
  EXPECT_TRUE(status.ok()) << status;
  device.Finish();
  EXPECT_TRUE(x.Intact() && post.Intact() && comb.Intact() && streams.Intact());
  return {x.ToHost(), post.ToHost(), comb.ToHost()};
}

std::vector<float> RunHead(HeadCase& c, const Form& form) {
  TestDevice device;
  const DeviceMatrix streams(c.streams, c.tokens, 4 * c.hidden, form.gap, form.dtype);
  const DeviceMatrix x(Nothing(c.tokens * c.hidden), c.tokens, c.hidden, form.gap, form.dtype);
  const DeviceWeight fn(c.Fn());
  const DeviceCopy<float> scale(c.scale), base(c.base);
  HyperConnectionHeadArgs args = c.Args();
  args.streams = streams.view();
  args.fn = fn.view();
  args.scale.data = scale.data();
  args.base.data = base.data();
  args.x = x.view();
  const auto& variant = Fused(HyperConnectionHeadVariants());
  EXPECT_TRUE(variant.supports(args));
  const absl::Status status = variant.launch(args, device.exec());
  EXPECT_TRUE(status.ok()) << status;
  device.Finish();
  EXPECT_TRUE(x.Intact() && streams.Intact());
  return x.ToHost();
}

// Among millions of sums of four streams some cancel to nearly nothing, and then one bf16 step of
// the result is less than the error of its terms; their number is held by the relative error.
void ExpectNearlyExact(const Form& form, const std::vector<float>& got,
                       const std::vector<float>& cpu, const std::vector<float>& exact) {
  if (form.needs_gpu) {
    EXPECT_LE(RelativeL2(got, exact), 1.1 * RelativeL2(cpu, exact) + 1e-5);
  } else {
    EXPECT_TRUE(Bf16FlipsWithin(got, cpu, exact, 2.0, 3e-3));
  }
}

class HyperConnectionFusedTest : public ::testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    ISTHMUS_REQUIRE_DEVICE();
    if (GetParam().needs_gpu && !testing::TestsRealShapes())
      GTEST_SKIP() << "needs a GPU for its size";
  }
  static NumericBound Bound() { return HyperConnectionPatches()[0]->bound; }
};

TEST_P(HyperConnectionFusedTest, PreStaysWithinItsBound) {
  const Form& form = GetParam();
  PreCase c(51, form.tokens, form.hidden);
  RoundAll(c.streams);
  PreCase cpu(51, form.tokens, form.hidden), exact(51, form.tokens, form.hidden);
  cpu.streams = exact.streams = c.streams;
  cpu.Run();
  exact.Run(HyperConnectionPreDefinition);
  const Outputs got = RunPre(c, form, false);
  EXPECT_TRUE(WithinBound(got.post, cpu.post, exact.post, Bound()));
  EXPECT_TRUE(WithinBound(got.comb, cpu.comb, exact.comb, Bound()));
  EXPECT_LE(RelativeL2(got.comb, exact.comb), 1e-5);
  ExpectNearlyExact(form, got.x, cpu.x, exact.x);
#if ISTHMUS_EMULATED
  const emulator::ReverseOrder reversed;
#endif
  ExpectSame(RunPre(c, form, false), got, "again");
}

TEST_P(HyperConnectionFusedTest, HeadStaysWithinItsBound) {
  const Form& form = GetParam();
  HeadCase c(52, form.tokens, form.hidden);
  RoundAll(c.streams);
  HeadCase cpu(52, form.tokens, form.hidden), exact(52, form.tokens, form.hidden);
  cpu.streams = exact.streams = c.streams;
  cpu.Run();
  exact.Run(HyperConnectionHeadDefinition);
  const std::vector<float> got = RunHead(c, form);
  ExpectNearlyExact(form, got, cpu.x, exact.x);
  EXPECT_TRUE(SameBits(RunHead(c, form), got));
}

TEST_P(HyperConnectionFusedTest, GivesATokenTheBitsThatItHasAlone) {
  const Form& form = GetParam();
  PreCase c(53, form.tokens, form.hidden);
  RoundAll(c.streams);
  const Outputs all = RunPre(c, form, true);
  const int64_t t = form.tokens - 1;
  PreCase alone = std::move(c);
  alone.KeepToken(t);
  const Outputs one = RunPre(alone, form, true);
  EXPECT_TRUE(SameBits(one.x, std::span(all.x).subspan(t * form.hidden)));
  EXPECT_TRUE(SameBits(one.post, std::span(all.post).subspan(t * 4)));
  EXPECT_TRUE(SameBits(one.comb, std::span(all.comb).subspan(t * 16)));
}

INSTANTIATE_TEST_SUITE_P(Forms, HyperConnectionFusedTest, ::testing::ValuesIn(kForms),
                         [](const auto& test) { return test.param.name; });

TEST(HyperConnectionFusesTest, OnlyWhatItsCopiesCanRead) {
  PreCase c(1, 2, 64);
  alignas(16) static float memory[2 * 264];
  MatrixView streams = {memory, DType::kF32, 2, 256, 256};
  MatrixView x = {memory, DType::kF32, 2, 64, 64};
  WeightView fn = c.Fn();
  EXPECT_FALSE(FusesMix(streams, fn, x, Arithmetic::kReference)) << "fn is not in tiles";
  fn.layout = WeightLayout::kMmaTiles;
  EXPECT_TRUE(FusesMix(streams, fn, x, Arithmetic::kReference));
  EXPECT_FALSE(FusesMix(streams, fn, x, Arithmetic::kMath)) << "not on the bf16 grid";
  streams.row_stride = 258;
  EXPECT_FALSE(FusesMix(streams, fn, x, Arithmetic::kReference)) << "row 1 is misaligned";
  streams.row_stride = 256;
  x.dtype = DType::kBf16;
  EXPECT_FALSE(FusesMix(streams, fn, x, Arithmetic::kReference)) << "two types";
  x = {memory, DType::kF32, 2, 48, 48};
  EXPECT_FALSE(FusesMix(streams, fn, x, Arithmetic::kReference)) << "no whole block";
}

}  // namespace
}  // namespace isthmus::kernels
