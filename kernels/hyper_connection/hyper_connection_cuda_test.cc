// SPDX-License-Identifier: Apache-2.0
// The CUDA variants of the hyper-connections: the trusted path has the CPU's bits, on a GPU and in
// the emulator, whatever the layout, the strides and the type of the matrices.
#include <algorithm>
#include <cmath>
#include <map>
#include <string>
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

using kernels::testing::DeviceCopy;
using kernels::testing::DeviceMatrix;
using kernels::testing::DeviceWeight;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;

struct Form {
  const char* name;
  int64_t tokens;
  int64_t hidden;
  int64_t gap = 0;
  DType dtype = DType::kF32;
  Arithmetic arithmetic = Arithmetic::kReference;
  WeightLayout layout = WeightLayout::kMmaTiles;
  bool needs_gpu = false;  // Too slow for the emulator.
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

const Form kForms[] = {
    {"Tiny", 1, 1},
    {"Odd", 3, 33},
    {"OddMath", 3, 33, 5, DType::kF32, Arithmetic::kMath, WeightLayout::kRowMajor},
    {"Strided", 19, 64, 8},
    {"Bf16", 5, 256, 8, DType::kBf16},
    {"Real", 1, 4096, 0, DType::kBf16},
    {"RealMany", 100, 4096, 64, DType::kF32, Arithmetic::kMath, WeightLayout::kMmaTiles, true},
};

std::vector<float> OnBf16Grid(std::vector<float> values) {
  for (float& value : values) value = RoundBf16(value);
  return values;
}
std::vector<float> Nothing(int64_t count) {
  return std::vector<float>(static_cast<size_t>(count), std::nanf(""));
}

// The trusted paths, whatever the defaults are.
Exec Trusted(TestDevice& device) {
  static const PatchSet kOff = [] {
    std::map<std::string, bool> off;
    for (const Patch* patch : HyperConnectionPatches()) off[std::string(patch->name)] = false;
    return PatchSet::Resolve(HyperConnectionPatches(), off).value();
  }();
  Exec exec = device.exec();
  exec.patches = &kOff;
  return exec;
}

// Runs `launch` twice, the second time with threads in the other order where they are emulated.
template <typename Launch>
void RunTwice(const TestDevice& device, Launch launch) {
  ASSERT_TRUE(launch().ok());
  device.Finish();
#if ISTHMUS_EMULATED
  const emulator::ReverseOrder reversed;
#endif
  ASSERT_TRUE(launch().ok());
  device.Finish();
}

class HyperConnectionCudaTest : public ::testing::TestWithParam<Form> {
 protected:
  void SetUp() override {
    ISTHMUS_REQUIRE_DEVICE();
    if (GetParam().needs_gpu && !testing::TestsRealShapes())
      GTEST_SKIP() << "needs a GPU for its size";
  }
  DeviceMatrix Matrix(const std::vector<float>& values, int64_t cols) const {
    const Form& form = GetParam();
    return {values, form.tokens, cols, form.gap, form.dtype};
  }
  DeviceMatrix Floats(const std::vector<float>& values, int64_t cols) const {
    return {values, GetParam().tokens, cols, GetParam().gap};
  }
};

TEST_P(HyperConnectionCudaTest, PreHasTheBitsOfTheCpu) {
  const Form& form = GetParam();
  PreCase c(31, form.tokens, form.hidden);
  if (form.dtype == DType::kBf16) c.streams = OnBf16Grid(c.streams);
  c.arithmetic = form.arithmetic;
  c.Run();
  TestDevice device;
  const DeviceMatrix streams = Matrix(c.streams, 4 * form.hidden);
  const DeviceMatrix x = Matrix(Nothing(form.tokens * form.hidden), form.hidden);
  const DeviceMatrix post = Floats(Nothing(form.tokens * 4), 4);
  const DeviceMatrix comb = Floats(Nothing(form.tokens * 16), 16);
  const DeviceWeight fn(c.Fn(), form.layout);
  const DeviceCopy<float> scale(c.scale);
  const DeviceCopy<float> base(c.base);
  HyperConnectionPreArgs args = c.Args();
  args.streams = streams.view();
  args.fn = fn.view();
  args.scale.data = scale.data();
  args.base.data = base.data();
  args.x = x.view();
  args.post = post.view();
  args.comb = comb.view();
  RunTwice(device, [&] { return HyperConnectionPre(args, Trusted(device)); });
  EXPECT_TRUE(SameBits(x.ToHost(), c.x));
  EXPECT_TRUE(SameBits(post.ToHost(), c.post));
  EXPECT_TRUE(SameBits(comb.ToHost(), c.comb));
  EXPECT_TRUE(x.Intact() && post.Intact() && comb.Intact() && streams.Intact());
}

TEST_P(HyperConnectionCudaTest, HeadHasTheBitsOfTheCpu) {
  const Form& form = GetParam();
  HeadCase c(32, form.tokens, form.hidden);
  if (form.dtype == DType::kBf16) c.streams = OnBf16Grid(c.streams);
  c.arithmetic = form.arithmetic;
  c.Run();
  TestDevice device;
  const DeviceMatrix streams = Matrix(c.streams, 4 * form.hidden);
  const DeviceMatrix x = Matrix(Nothing(form.tokens * form.hidden), form.hidden);
  const DeviceWeight fn(c.Fn(), form.layout);
  const DeviceCopy<float> scale(c.scale);
  const DeviceCopy<float> base(c.base);
  HyperConnectionHeadArgs args = c.Args();
  args.streams = streams.view();
  args.fn = fn.view();
  args.scale.data = scale.data();
  args.base.data = base.data();
  args.x = x.view();
  RunTwice(device, [&] { return HyperConnectionHead(args, Trusted(device)); });
  EXPECT_TRUE(SameBits(x.ToHost(), c.x));
  EXPECT_TRUE(x.Intact());
}

TEST_P(HyperConnectionCudaTest, PostHasTheBitsOfTheCpuInPlaceToo) {
  const Form& form = GetParam();
  PostCase c(33, form.tokens, form.hidden);
  if (form.dtype == DType::kBf16) {
    c.streams = OnBf16Grid(c.streams);
    c.y = OnBf16Grid(c.y);
  }
  c.arithmetic = form.arithmetic;
  c.Run();
  TestDevice device;
  const DeviceMatrix y = Matrix(c.y, form.hidden);
  const DeviceMatrix streams = Matrix(c.streams, 4 * form.hidden);
  const DeviceMatrix out = Matrix(Nothing(form.tokens * 4 * form.hidden), 4 * form.hidden);
  const DeviceMatrix post = Floats(c.post, 4);
  const DeviceMatrix comb = Floats(c.comb, 16);
  HyperConnectionPostArgs args = c.Args();
  args.y = y.view();
  args.streams = streams.view();
  args.post = post.view();
  args.comb = comb.view();
  args.out = out.view();
  RunTwice(device, [&] { return HyperConnectionPost(args, device.exec()); });
  EXPECT_TRUE(SameBits(out.ToHost(), c.out));
  args.out = args.streams;
  ASSERT_TRUE(HyperConnectionPost(args, device.exec()).ok());
  device.Finish();
  EXPECT_TRUE(SameBits(streams.ToHost(), c.out));
  EXPECT_TRUE(out.Intact() && streams.Intact());
}

INSTANTIATE_TEST_SUITE_P(Forms, HyperConnectionCudaTest, ::testing::ValuesIn(kForms),
                         [](const auto& test) { return test.param.name; });

TEST(HyperConnectionCudaRefusalTest, TakesNoTokensAndRefusesBf16InMathArithmetic) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  PreCase c(1, 1, 8);
  HyperConnectionPreArgs args = c.Args();
  args.arithmetic = Arithmetic::kMath;
  args.x.dtype = DType::kBf16;
  EXPECT_EQ(HyperConnectionPre(args, device.exec()).code(), absl::StatusCode::kInvalidArgument);
  args = c.Args();
  args.streams.rows = args.x.rows = args.post.rows = args.comb.rows = 0;
  EXPECT_TRUE(HyperConnectionPre(args, device.exec()).ok());
  HyperConnectionPostArgs post = PostCase(1, 1, 8).Args();
  post.y.rows = post.streams.rows = post.post.rows = post.comb.rows = post.out.rows = 0;
  EXPECT_TRUE(HyperConnectionPost(post, device.exec()).ok());
}

}  // namespace
}  // namespace isthmus::kernels
