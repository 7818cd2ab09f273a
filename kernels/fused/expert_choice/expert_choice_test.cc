// SPDX-License-Identifier: Apache-2.0
// Every variant of expert_choice against linear and gate on the CPU: where every sum is exact, in
// whatever order, the same bits; else scores within the bound, and the choice that they ask for.
#include "kernels/fused/expert_choice/expert_choice.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/fused/expert_choice/expert_choice_variants.h"
#include "kernels/linear/linear.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif

namespace isthmus::kernels {

void PrintTo(const ExpertChoiceVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path") << " of architecture "
       << variant.arches.begin;
}

namespace {

using testing::CanRunHere;
using testing::DeviceCopy;
using testing::DeviceWeight;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SameBits;
using testing::TestDevice;
using testing::WithinBound;

struct Choice {
  std::vector<float> scores, weights;
  std::vector<int32_t> ids;
};

struct Inputs {
  // Small multiples of powers of two, so that every product and every sum of them is exact.
  static Inputs Exact(int64_t tokens, int64_t experts, int64_t cols, int64_t k) {
    Inputs in = {.tokens = tokens, .experts = experts, .cols = cols, .k = k};
    testing::Random random(static_cast<uint64_t>(tokens * experts + cols));
    const auto draw = [&](int64_t count, int64_t most, float unit) {
      std::vector<float> values;
      for (int64_t i = 0; i < count; ++i) {
        values.push_back(static_cast<float>(random.Below(2 * most + 1) - most) * unit);
      }
      return values;
    };
    in.x = draw(tokens * cols, 1000, 1.0f / 1024);  // More bits than bf16 has.
    in.weight =
        testing::WeightFrom(WeightFormat::kBf16, experts, cols, draw(experts * cols, 3, 0.25f));
    in.bias = testing::NormalValues(7, experts, 0.3f);
    return in;
  }
  ExpertChoiceArgs Args(float* x_at, const WeightView& weight_at, float* scores) const {
    ExpertChoiceArgs args = {.x = F32Matrix(x_at, tokens, cols), .weight = weight_at, .gate = {}};
    args.gate.logits = args.gate.scores = F32Matrix(scores, tokens, experts);
    args.gate.bias = F32Vector(bias.data(), static_cast<int64_t>(bias.size()));
    args.gate.hash_ids = hash_ids;
    args.gate.token_ids = token_ids;
    args.gate.k = k;
    args.gate.route_scale = 1.5f;
    return args;
  }
  Choice Empty() const {
    return {.scores = std::vector<float>(static_cast<size_t>(tokens * experts)),
            .weights = std::vector<float>(static_cast<size_t>(tokens * k)),
            .ids = std::vector<int32_t>(static_cast<size_t>(tokens * k))};
  }
  Choice OnCpu() {
    Choice out = Empty();
    ExpertChoiceArgs args = Args(x.data(), weight.view, out.scores.data());
    args.gate.ids = out.ids.data();
    args.gate.weights = out.weights.data();
    const absl::Status status = ExpertChoice(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }

  int64_t tokens, experts, cols, k;
  std::vector<float> x = {}, bias = {};
  testing::OwnedWeight weight = {};
  std::vector<int64_t> hash_ids = {};
  std::vector<int32_t> token_ids = {};
};

class ExpertChoiceTest : public ::testing::TestWithParam<ExpertChoiceVariant> {
 protected:
  static Choice OnDevice(Inputs& in, TestDevice& device) {
    const DeviceCopy<float> x(in.x), bias(in.bias);
    const DeviceCopy<int64_t> hash_ids(in.hash_ids);
    const DeviceCopy<int32_t> token_ids(in.token_ids);
    const DeviceCopy<float> scores(in.tokens * in.experts), weights(in.tokens * in.k);
    const DeviceCopy<int32_t> ids(in.tokens * in.k);
    const DeviceWeight weight(in.weight.view);
    ExpertChoiceArgs args = in.Args(x.data(), weight.view(), scores.data());
    args.gate.bias.data = bias.data();
    args.gate.hash_ids = {hash_ids.data(), in.hash_ids.size()};
    args.gate.token_ids = {token_ids.data(), in.token_ids.size()};
    args.gate.ids = ids.data();
    args.gate.weights = weights.data();
    EXPECT_TRUE(GetParam().supports == nullptr || GetParam().supports(args));
    for (int run = 0; run < 2; ++run) {  // The second finds the counters as the first left them.
      const absl::Status status = GetParam().launch(args, device.exec());
      EXPECT_TRUE(status.ok()) << status;
    }
    device.Finish();
    EXPECT_TRUE(scores.Intact() && weights.Intact() && ids.Intact());
    return {scores.ToHost(), weights.ToHost(), ids.ToHost()};
  }
};

TEST_P(ExpertChoiceTest, HasTheBitsOfTheCpuWhereSumsAreExact) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device(kPhaseDecode);
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  struct Shape {
    int64_t tokens, experts, cols, k;
  };
  std::vector<Shape> shapes = {{1, 16, 640, 6}, {9, 40, 200, 5}, {3, 256, 64, 6}, {2, 5, 7, 5}};
  if (IsRealDevice()) {
    shapes.insert(shapes.end(), {{1, 256, 4096, 6}, {8, 256, 4096, 6}, {64, 256, 4096, 6}});
  }
  for (const auto& [tokens, experts, cols, k] : shapes) {
    Inputs in = Inputs::Exact(tokens, experts, cols, k);
    const Choice expected = in.OnCpu();
    for (const bool is_reversed : {false, true}) {
#if ISTHMUS_EMULATED
      std::optional<emulator::ReverseOrder> reversed;
      if (is_reversed) reversed.emplace();
#endif
      const Choice got = OnDevice(in, device);
      EXPECT_EQ(got.ids, expected.ids) << experts << is_reversed;
      EXPECT_TRUE(SameBits(got.scores, expected.scores)) << experts << is_reversed;
      EXPECT_TRUE(SameBits(got.weights, expected.weights)) << experts << is_reversed;
    }
  }
}

TEST_P(ExpertChoiceTest, ReadsTheTableAndLeavesPaddingEmpty) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device(kPhaseDecode);
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  Inputs in = Inputs::Exact(4, 32, 128, 2);
  in.bias = {};
  in.hash_ids = {0, 1, 3, 2, 31, 1, 5, 32};  // The last names no expert.
  in.token_ids = {2, 1, 0, 1};
  const Choice expected = in.OnCpu();
  in.token_ids = {2, -1, 0, 3};
  const Choice got = OnDevice(in, device);
  EXPECT_THAT(got.ids, ElementsAre(31, 1, -1, -1, 0, 1, 5, -1));
  EXPECT_EQ(got.weights[0], expected.weights[0]);
  EXPECT_EQ(got.weights[2], 0.0f);
  EXPECT_EQ(got.weights[6], 1.5f);
  EXPECT_EQ(got.weights[7], 0.0f);
  Inputs without = Inputs::Exact(3, 32, 128, 2);
  const Choice all = without.OnCpu();
  without.token_ids = {7, -1, 9};
  const Choice some = OnDevice(without, device);
  EXPECT_THAT(some.ids, ElementsAre(all.ids[0], all.ids[1], -1, -1, all.ids[4], all.ids[5]));
}

TEST_P(ExpertChoiceTest, ChoosesWhatItsScoresAskFor) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device(kPhaseDecode);
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  Inputs in = Inputs::Exact(11, 48, 300, 6);
  in.x = testing::OutlierValues(3, in.tokens * in.cols);
  in.weight = testing::RandomWeight(5, WeightFormat::kBf16, in.experts, in.cols);
  const Choice expected = in.OnCpu();
  const Choice got = OnDevice(in, device);
  const NumericBound bound = GetParam().patch != nullptr ? GetParam().patch->bound : kTrustedBound;
  EXPECT_TRUE(WithinBound(got.scores, expected.scores, expected.scores, bound));
  for (int64_t t = 0; t < in.tokens; ++t) {
    const float* scores = got.scores.data() + t * in.experts;
    std::vector<int32_t> order(static_cast<size_t>(in.experts));
    std::iota(order.begin(), order.end(), 0);
    const auto key = [&](int32_t e) { return scores[e] + in.bias[static_cast<size_t>(e)]; };
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return key(a) > key(b); });
    order.resize(static_cast<size_t>(in.k));
    const auto* ids = got.ids.data() + t * in.k;
    EXPECT_THAT(std::vector<int32_t>(ids, ids + in.k), ::testing::ElementsAreArray(order)) << t;
  }
}

// A build without CUDA has no variant of it.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ExpertChoiceTest);
INSTANTIATE_TEST_SUITE_P(Table, ExpertChoiceTest,
                         ::testing::ValuesIn(testing::DeviceVariants(ExpertChoiceVariants())),
                         testing::VariantName<ExpertChoiceVariant>);

TEST(ExpertChoiceRefusalTest, NamesWhatDoesNotFit) {
  Inputs in = Inputs::Exact(2, 16, 32, 2);
  Choice out = in.Empty();
  ExpertChoiceArgs args = in.Args(in.x.data(), in.weight.view, out.scores.data());
  args.gate.ids = out.ids.data();
  args.gate.weights = out.weights.data();
  args.x.cols = 31;
  absl::Status status = ExpertChoice(args, Exec{});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("x is [2, 31], weight [16, 32]"));
  args.x.cols = 32;
  std::vector<float> others(32);
  args.gate.scores.data = others.data();
  status = ExpertChoice(args, Exec{});
  EXPECT_THAT(std::string(status.message()), HasSubstr("scores is not gate.logits"));
}

}  // namespace
}  // namespace isthmus::kernels
