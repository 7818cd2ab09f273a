// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of gate against the CPU path: the same experts, in the trusted path the same
// bits; padding rows; tables that lead nowhere.
#include <cmath>
#include <limits>
#include <ostream>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/gate/gate_variants.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const GateVariant& variant, std::ostream* out) {
  *out << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using kernels::testing::CanRunHere;
using kernels::testing::DeviceCopy;
using kernels::testing::NormalValues;
using kernels::testing::SameBits;
using kernels::testing::TestDevice;
using kernels::testing::WithinBound;
using ::testing::ElementsAre;

struct Choice {
  std::vector<float> scores, weights;
  std::vector<int32_t> ids;
};

struct Inputs {
  std::vector<float> logits;
  int64_t tokens, experts, k;
  std::vector<float> bias;
  std::vector<int64_t> hash_ids;
  std::vector<int32_t> token_ids;

  GateArgs Args() {
    GateArgs args;
    args.logits = F32Matrix(logits.data(), tokens, experts);
    args.bias = F32Vector(bias.data(), static_cast<int64_t>(bias.size()));
    args.hash_ids = hash_ids;
    args.token_ids = token_ids;
    args.k = k;
    args.route_scale = 1.5f;
    return args;
  }
  Choice OnCpu() {
    Choice out = {.scores = std::vector<float>(static_cast<size_t>(tokens * experts)),
                  .weights = std::vector<float>(static_cast<size_t>(tokens * k)),
                  .ids = std::vector<int32_t>(static_cast<size_t>(tokens * k))};
    GateArgs args = Args();
    args.scores = F32Matrix(out.scores.data(), tokens, experts);
    args.ids = out.ids.data();
    args.weights = out.weights.data();
    const absl::Status status = Gate(args, Exec{});
    EXPECT_TRUE(status.ok()) << status;
    return out;
  }
};

class GateCudaTest : public ::testing::TestWithParam<GateVariant> {
 protected:
  Choice OnDevice(Inputs& in, TestDevice& device, bool in_place = false) {
    const DeviceCopy<float> logits(in.logits);
    const DeviceCopy<float> bias(in.bias);
    const DeviceCopy<int64_t> hash_ids(in.hash_ids);
    const DeviceCopy<int32_t> token_ids(in.token_ids);
    const DeviceCopy<float> scores(in.tokens * in.experts);
    const DeviceCopy<float> weights(in.tokens * in.k);
    const DeviceCopy<int32_t> ids(in.tokens * in.k);
    GateArgs args = in.Args();
    args.logits = F32Matrix(logits.data(), in.tokens, in.experts);
    args.scores = in_place ? args.logits : F32Matrix(scores.data(), in.tokens, in.experts);
    args.bias.data = bias.data();
    args.hash_ids = {hash_ids.data(), in.hash_ids.size()};
    args.token_ids = {token_ids.data(), in.token_ids.size()};
    args.ids = ids.data();
    args.weights = weights.data();
    EXPECT_TRUE(ValidateGate(args, device.exec().arch).ok());
    const absl::Status status = GetParam().launch(args, device.exec());
    EXPECT_TRUE(status.ok()) << status;
    device.Finish();
    EXPECT_TRUE(scores.Intact());
    EXPECT_TRUE(weights.Intact());
    EXPECT_TRUE(ids.Intact());
    return {in_place ? logits.ToHost() : scores.ToHost(), weights.ToHost(), ids.ToHost()};
  }
  void ExpectTheCpus(Inputs& in, TestDevice& device) {
    const Choice expected = in.OnCpu();
    const Choice got = OnDevice(in, device);
    EXPECT_EQ(got.ids, expected.ids);
    if (GetParam().patch == nullptr) {
      EXPECT_TRUE(SameBits(got.scores, expected.scores));
      EXPECT_TRUE(SameBits(got.weights, expected.weights));
    } else {
      EXPECT_TRUE(
          WithinBound(got.weights, expected.weights, expected.weights, GetParam().patch->bound));
    }
    const Choice in_place = OnDevice(in, device, true);
    EXPECT_EQ(in_place.ids, got.ids);
    EXPECT_TRUE(SameBits(in_place.weights, got.weights));
  }
};

TEST_P(GateCudaTest, ChoosesAsTheCpuDoes) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  const std::pair<int64_t, int64_t> shapes[] = {{256, 6}, {4, 4}, {1, 1}, {37, 5}, {100, 64}};
  for (const auto& [experts, k] : shapes) {
    Inputs in = {NormalValues(1, 7 * experts, 4.0f), 7,  experts, k,
                 NormalValues(2, experts, 0.3f),     {}, {}};
    ExpectTheCpus(in, device);
  }
}

TEST_P(GateCudaTest, OrdersEqualsByIdAndNanLast) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  Inputs in = {{nan, -50.0f, nan, 2.0f, 1.25f, 1.25f, 1.25f, 1.25f, -infinity, -infinity, -infinity,
                -infinity},
               3,
               4,
               3,
               std::vector<float>(4, 0.0f),
               {},
               {}};
  const Choice got = OnDevice(in, device);
  EXPECT_THAT(got.ids, ElementsAre(3, 1, 0, 0, 1, 2, 0, 1, 2));
  EXPECT_TRUE(std::isnan(got.weights[0]));
  EXPECT_FLOAT_EQ(got.weights[3], 0.5f);
  EXPECT_EQ(got.weights[6], 0.0f);
}

TEST_P(GateCudaTest, ReadsTheTableAndLeavesPaddingEmpty) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  Inputs in = {NormalValues(3, 6 * 40), 6, 40, 2, {}, {0, 1, 3, 2, 39, 1, 5, 40},
               {2, 1, 0, 2, 1, 1}};
  ExpectTheCpus(in, device);
  in.token_ids = {2, -1, 0, 4, 3, -1};  // Of a table of four rows, the last naming no expert.
  const Choice got = OnDevice(in, device);
  EXPECT_THAT(got.ids, ElementsAre(39, 1, -1, -1, 0, 1, -1, -1, 5, -1, -1, -1));
  EXPECT_EQ(got.weights[2], 0.0f);
  EXPECT_EQ(got.weights[7], 0.0f);
  EXPECT_EQ(got.weights[8], 1.5f);
  EXPECT_EQ(got.weights[9], 0.0f);
}

TEST_P(GateCudaTest, LeavesPaddingEmptyWithoutATableToo) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  if (!CanRunHere(GetParam(), device.exec())) GTEST_SKIP() << "another architecture's";
  Inputs in = {NormalValues(4, 3 * 16), 3, 16, 2, NormalValues(5, 16), {}, {7, -1, 9}};
  in.logits[16] = std::numeric_limits<float>::quiet_NaN();
  Inputs clean = in;
  clean.token_ids = {};
  const Choice expected = clean.OnCpu();
  const Choice got = OnDevice(in, device);
  EXPECT_THAT(got.ids, ElementsAre(expected.ids[0], expected.ids[1], -1, -1, expected.ids[4],
                                   expected.ids[5]));
  EXPECT_EQ(got.weights[2], 0.0f);
  EXPECT_EQ(got.weights[4], expected.weights[4]);
}

INSTANTIATE_TEST_SUITE_P(Table, GateCudaTest,
                         ::testing::ValuesIn(kernels::testing::DeviceVariants(GateVariants())),
                         kernels::testing::VariantName<GateVariant>);

}  // namespace
}  // namespace isthmus::kernels
