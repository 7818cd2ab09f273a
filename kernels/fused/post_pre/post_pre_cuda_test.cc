// SPDX-License-Identifier: Apache-2.0
// The fused launches: new streams with the bits of the trusted path, gates and x within the bound
// of each precision, whatever the number of tokens, their type, strides and aliases.
#include <algorithm>
#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/fused/post_pre/post_pre.h"
#include "kernels/fused/post_pre/post_pre_cases.h"
#include "kernels/fused/post_pre/post_pre_variants.h"
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
  bool in_place = false;
  bool has_norm = true;
  bool needs_gpu = false;  // Too slow for the emulator.
};
void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

// Token counts around a tile, beyond what the stages hold, and columns beyond what a block of the
// second launch has in registers.
const Form kForms[] = {
    {"One", 1, 192},
    {"OneWithoutNorm", 1, 64, DType::kBf16, 0, false, false},
    {"Two", 2, 256, DType::kBf16, 8},
    {"Three", 3, 128, DType::kF32, 4, true},
    {"Nine", 9, 192, DType::kBf16, 0, true},
    {"ThirtyThree", 33, 128, DType::kBf16},
    {"ThirtyThreeWithoutNorm", 33, 64, DType::kF32, 8, true, false},
    {"Hundreds", 135, 64, DType::kBf16, 8},
    {"Many", 523, 64, DType::kBf16, 0, true},
    {"ManyF32", 517, 64},
    {"Real", 1, 4096, DType::kBf16},
    {"Wide", 2, 4224},
    {"RealBatch", 64, 4096, DType::kBf16, 0, true, true, true},
    {"RealPrefill", 521, 4096, DType::kBf16, 0, true, true, true},
    {"RealF32", 70, 4096, DType::kF32, 0, true, true, true},
};

struct Outputs {
  std::vector<float> streams, x, post, comb;
};
void ExpectSame(const Outputs& got, const Outputs& want, const char* what) {
  EXPECT_TRUE(SameBits(got.streams, want.streams)) << what;
  EXPECT_TRUE(SameBits(got.x, want.x)) << what;
  EXPECT_TRUE(SameBits(got.post, want.post)) << what;
  EXPECT_TRUE(SameBits(got.comb, want.comb)) << what;
}

// Arguments in device memory; run as often as asked, since each time begins with fresh copies.
class OnDevice {
 public:
  OnDevice(PostPreCase& c, const Form& form, bool in_place)
      : y_(c.post.y, form.tokens, form.hidden, form.gap, form.dtype),
        streams_(c.post.streams, form.tokens, 4 * form.hidden, form.gap, form.dtype),
        out_(Nothing(form.tokens * 4 * form.hidden), form.tokens, 4 * form.hidden, form.gap,
             form.dtype),
        x_(Nothing(form.tokens * form.hidden), form.tokens, form.hidden, form.gap, form.dtype),
        post_in_(c.post.post, form.tokens, 4, 4),
        comb_in_(c.post.comb, form.tokens, 16),
        post_(Nothing(form.tokens * 4), form.tokens, 4),
        comb_(Nothing(form.tokens * 16), form.tokens, 16, 4),
        fn_(c.pre.Fn()),
        scale_(c.pre.scale),
        base_(c.pre.base),
        weight_(c.norm_weight),
        args_(c.Args()) {
    args_.post.y = y_.view();
    args_.post.streams = streams_.view();
    args_.post.out = in_place ? streams_.view() : out_.view();
    args_.post.post = post_in_.view();
    args_.post.comb = comb_in_.view();
    args_.pre.streams = args_.post.out;
    args_.pre.fn = fn_.view();
    args_.pre.scale.data = scale_.data();
    args_.pre.base.data = base_.data();
    args_.pre.x = x_.view();
    args_.pre.post = in_place ? post_in_.view() : post_.view();
    args_.pre.comb = in_place ? comb_in_.view() : comb_.view();
    if (form.has_norm) args_.norm_weight.data = weight_.data();
    in_place_ = in_place;
  }

  const PostPreArgs& args() const { return args_; }
  Outputs Read() const {
    EXPECT_TRUE(out_.Intact() && x_.Intact() && post_.Intact() && comb_.Intact());
    EXPECT_TRUE(streams_.Intact() && post_in_.Intact() && comb_in_.Intact());
    return {(in_place_ ? streams_ : out_).ToHost(), x_.ToHost(),
            (in_place_ ? post_in_ : post_).ToHost(), (in_place_ ? comb_in_ : comb_).ToHost()};
  }

 private:
  static std::vector<float> Nothing(int64_t count) {
    return std::vector<float>(static_cast<size_t>(count), std::nanf(""));
  }
  DeviceMatrix y_, streams_, out_, x_, post_in_, comb_in_, post_, comb_;
  DeviceWeight fn_;
  DeviceCopy<float> scale_, base_, weight_;
  PostPreArgs args_;
  bool in_place_ = false;
};

Outputs RunVariant(const PostPreVariant& variant, PostPreCase& c, const Form& form, bool in_place,
                   bool batch_invariant = false, int num_sms = 0) {
  TestDevice device;
  if (num_sms != 0) device.exec().num_sms = num_sms;
  device.exec().batch_invariant = batch_invariant;
  const OnDevice on_device(c, form, in_place);
  EXPECT_TRUE(ValidatePostPre(on_device.args(), device.exec().arch).ok());
  EXPECT_TRUE(variant.supports == nullptr || variant.supports(on_device.args()));
  const absl::Status status = variant.launch(on_device.args(), device.exec());
  EXPECT_TRUE(status.ok()) << status;
  device.Finish();
  return on_device.Read();
}

class PostPreTest : public ::testing::TestWithParam<std::tuple<PostPreVariant, Form>> {
 protected:
  void SetUp() override {
    ISTHMUS_REQUIRE_DEVICE();
    if (std::get<1>(GetParam()).needs_gpu && !testing::TestsRealShapes()) {
      GTEST_SKIP() << "needs a GPU for its size";
    }
  }
};

// Gates and x against the definition, from the streams that the CPU made.
void ExpectWithinBound(const Outputs& got, PostPreCase& cpu, const Form& form,
                       const NumericBound& bound) {
  PostPreCase exact(7, form.tokens, form.hidden);
  exact.has_norm = form.has_norm;
  exact.pre.streams = cpu.post.out;
  ASSERT_TRUE(HyperConnectionPreDefinition(exact.pre.Args(), Exec{}).ok());
  EXPECT_TRUE(WithinBound(got.post, cpu.pre.post, exact.pre.post, bound));
  EXPECT_TRUE(WithinBound(got.comb, cpu.pre.comb, exact.pre.comb, bound));
  ::testing::Test::RecordProperty("error_of_comb",
                                  std::to_string(1e9 * RelativeL2(got.comb, exact.pre.comb)));
  ::testing::Test::RecordProperty("error_of_comb_on_the_cpu",
                                  std::to_string(1e9 * RelativeL2(cpu.pre.comb, exact.pre.comb)));
  const bool is_exact = bound.floor <= 1e-5;
  if (is_exact) {
    EXPECT_LE(RelativeL2(got.post, exact.pre.post), 1e-5);
    EXPECT_LE(RelativeL2(got.comb, exact.pre.comb), 1e-5);
  }
  // x is rounded to bf16, after the norm a second time.
  if (!form.has_norm && is_exact) {
    EXPECT_TRUE(Bf16FlipsWithin(got.x, cpu.pre.x, exact.pre.x, 2.0, 3e-3));
  }
  EXPECT_LE(RelativeL2(got.x, cpu.pre.x), 2.0 * bound.floor + 5e-4);
}

TEST_P(PostPreTest, HasTheStreamsOfTheCpuAndStaysWithinItsBound) {
  const auto& [variant, form] = GetParam();
  PostPreCase cpu(7, form.tokens, form.hidden);
  cpu.has_norm = form.has_norm;
  cpu.Run();
  PostPreCase c(7, form.tokens, form.hidden);
  c.has_norm = form.has_norm;
  const Outputs got = RunVariant(variant, c, form, form.in_place);
  EXPECT_TRUE(SameBits(got.streams, cpu.post.out));
  const NumericBound bound = variant.patch != nullptr ? variant.patch->bound : kTrustedBound;
  ExpectWithinBound(got, cpu, form, bound);
#if ISTHMUS_EMULATED
  const emulator::ReverseOrder reversed;
#endif
  ExpectSame(RunVariant(variant, c, form, !form.in_place), got, "again, with other aliases");
  ExpectSame(RunVariant(variant, c, form, form.in_place, false, 1), got, "with fewer blocks");
}

TEST_P(PostPreTest, GivesEachTokenTheBitsThatItHasAlone) {
  const auto& [variant, form] = GetParam();
  if (form.tokens > 64) GTEST_SKIP() << "the smaller batches show it";
  PostPreCase c(8, form.tokens, form.hidden);
  c.has_norm = form.has_norm;
  const Outputs all = RunVariant(variant, c, form, false, true);
  Form one = form;
  one.tokens = 1;
  const int64_t n = form.hidden;
  for (const int64_t t : {int64_t{0}, form.tokens / 2, form.tokens - 1}) {
    PostPreCase alone(8, form.tokens, n);
    alone.has_norm = form.has_norm;
    const auto keep = [t](std::vector<float>& values, int64_t width) {
      values = std::vector<float>(values.begin() + t * width, values.begin() + (t + 1) * width);
    };
    keep(alone.post.y, n), keep(alone.post.streams, 4 * n), keep(alone.post.out, 4 * n);
    keep(alone.post.post, 4), keep(alone.post.comb, 16);
    alone.pre.KeepToken(t);
    alone.post.tokens = 1;
    Outputs expected = all;
    keep(expected.streams, 4 * n), keep(expected.x, n);
    keep(expected.post, 4), keep(expected.comb, 16);
    ExpectSame(RunVariant(variant, alone, one, false, true), expected, "alone");
  }
}

std::vector<std::tuple<PostPreVariant, Form>> CudaCases() {
  std::vector<std::tuple<PostPreVariant, Form>> out;
  for (const PostPreVariant& variant : PostPreVariants()) {
    if (variant.launch == nullptr) continue;
    for (const Form& form : kForms) {
      // The norm of the trusted path is another operation's, in f32.
      if (variant.patch != nullptr || form.dtype == DType::kF32) out.emplace_back(variant, form);
    }
  }
  return out;
}

INSTANTIATE_TEST_SUITE_P(Table, PostPreTest, ::testing::ValuesIn(CudaCases()),
                         [](const auto& test) {
                           const PostPreVariant& variant = std::get<0>(test.param);
                           std::string name = variant.patch != nullptr
                                                  ? std::string(variant.patch->name.substr(17))
                                                  : "trusted";
                           return name + "_" + std::get<1>(test.param).name;
                         });

}  // namespace
}  // namespace isthmus::kernels
