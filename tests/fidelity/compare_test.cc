// SPDX-License-Identifier: Apache-2.0
// The comparison passes what is equal and sees what is not: without this a fidelity test could not
// fail.
#include "tests/fidelity/compare.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace isthmus::fidelity {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

TensorSet SetOf(std::string mode, std::string name, Tensor tensor) {
  TensorSet set;
  set.mode = std::move(mode);
  set.tensors[std::move(name)] = std::move(tensor);
  return set;
}

Tensor Row(std::vector<float> values, std::string dtype = "F32") {
  Tensor tensor;
  tensor.dtype = std::move(dtype);
  tensor.shape = {1, static_cast<int64_t>(values.size())};
  tensor.values = std::move(values);
  return tensor;
}

bool Passes(const TensorSet& golden, const TensorSet& got) { return Compare(golden, got).passed(); }

TEST(CompareTest, RelativeL2ByHand) {
  EXPECT_DOUBLE_EQ(RelativeL2({3, 4}, {3, 4}), 0.0);
  EXPECT_DOUBLE_EQ(RelativeL2({3, 4}, {3, 5}), 0.2);  // |(0, 1)| / |(3, 4)|
  EXPECT_DOUBLE_EQ(RelativeL2({3, 4, kMinusInfinity}, {3, 5, 7}), 0.2);
  EXPECT_EQ(RelativeL2({3, 4}, {3, std::nanf("")}), std::numeric_limits<double>::infinity());
}

TEST(CompareTest, MathHoldsEverythingToTheLeastLimit) {
  const TensorSet golden = SetOf("math", "layer0.streams", Row({3, 4}));
  EXPECT_TRUE(Passes(golden, SetOf("", "layer0.streams", Row({3, 4.00004f}))));   // 8e-6
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.streams", Row({3, 4.00006f}))));  // 1.2e-5
}

TEST(CompareTest, MathIgnoresTheFloors) {
  TensorSet golden = SetOf("math", "layer0.streams", Row({3, 4}));
  golden.floors["layer0.streams"].l2 = 1.0;
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.streams", Row({3, 4.1f}))));
}

TEST(CompareTest, ReferenceLimitIsFactorTimesFloor) {
  TensorSet golden = SetOf("ref", "layer0.attn_out", Row({3, 4}, "BF16"));
  golden.floors["layer0.attn_out"].l2 = 0.01;                                    // Limit 0.03.
  EXPECT_TRUE(Passes(golden, SetOf("", "layer0.attn_out", Row({3, 4.14f}))));    // 0.028
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.attn_out", Row({3, 4.16f}))));   // 0.032
  golden.floors.clear();                                                         // 2^-8 = 0.0039
  EXPECT_TRUE(Passes(golden, SetOf("", "layer0.attn_out", Row({3, 4.019f}))));   // 0.0038
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.attn_out", Row({3, 4.021f}))));  // 0.0042
}

TEST(CompareTest, MathWantsSetsEqualAndIgnoresTheirOrder) {
  const TensorSet golden = SetOf("math", "layer1.topk", Row({5, 2, 9, -1}, "I32"));
  EXPECT_TRUE(Passes(golden, SetOf("", "layer1.topk", Row({9, 5, 2, -1}))));
  EXPECT_TRUE(Passes(golden, SetOf("", "layer1.topk", Row({9, 5, 2}))));  // Padding only.
  EXPECT_FALSE(Passes(golden, SetOf("", "layer1.topk", Row({9, 5, 3, -1}))));
  EXPECT_FALSE(Passes(golden, SetOf("", "layer1.topk", Row({9, 5, -1, -1}))));
}

TEST(CompareTest, ReferenceSetsMayOverlapAsMuchAsTheirFloorAllows) {
  TensorSet golden = SetOf("ref", "layer1.topk", Row({1, 2, 3, 4}, "I32"));
  const TensorSet got = SetOf("", "layer1.topk", Row({1, 2, 3, 5}));  // Overlap 3 of 5.
  EXPECT_FALSE(Passes(golden, got));
  golden.floors["layer1.topk"].overlap = 0.87;  // At least 1 - 3 * 0.13 - 0.01 = 0.6.
  EXPECT_TRUE(Passes(golden, got));
  golden.floors["layer1.topk"].overlap = 0.88;
  EXPECT_FALSE(Passes(golden, got));
}

TEST(CompareTest, TakesTheRowsThatTheGoldenFileHolds) {
  Tensor want;
  want.dtype = "F32";
  want.shape = {2, 1};
  want.values = {10, 30};
  TensorSet golden = SetOf("math", "layer0.streams", want);
  Tensor positions;
  positions.dtype = "I32";
  positions.shape = {2};
  positions.values = {1, 3};
  golden.tensors["positions"] = positions;
  Tensor got;
  got.dtype = "F32";
  got.shape = {5, 1};
  got.values = {0, 10, 20, 30, 40};
  EXPECT_TRUE(Passes(golden, SetOf("", "layer0.streams", got)));
  got.values[3] = 31;
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.streams", got)));
  got.shape = {3, 1};
  got.values = {0, 10, 20};  // Too short to hold row 3.
  EXPECT_FALSE(Passes(golden, SetOf("", "layer0.streams", got)));
}

TEST(CompareTest, AMissingTensorFails) {
  const TensorSet golden = SetOf("math", "layer0.streams", Row({1}));
  const Comparison comparison = Compare(golden, TensorSet());
  EXPECT_FALSE(comparison.passed());
  EXPECT_EQ(comparison.missing, std::vector<std::string>{"layer0.streams"});
}

TEST(CompareTest, AnotherShapeFails) {
  EXPECT_FALSE(Passes(SetOf("math", "logits", Row({1, 2})), SetOf("", "logits", Row({1, 2, 3}))));
}

TEST(CompareTest, NothingComparedIsNoPass) { EXPECT_FALSE(Passes(TensorSet(), TensorSet())); }

TEST(CompareTest, DecodesKvEntries) {
  std::vector<float> bytes(584, 0.0f);
  bytes[0] = 0x38;   // e4m3 1.0 in the block of scale 0
  bytes[64] = 0xb8;  // -1.0 in the block of scale 1
  bytes[448] = 0x80;
  bytes[449] = 0x3f;  // bf16 1.0
  bytes[576] = 128;   // 2^1
  bytes[577] = 126;   // 2^-1
  const Tensor values = DecodeKvEntries(Row(bytes, "U8"));
  EXPECT_EQ(values.shape, (std::vector<int64_t>{1, 512}));
  EXPECT_EQ(values.values[0], 2.0f);
  EXPECT_EQ(values.values[64], -0.5f);
  EXPECT_EQ(values.values[448], 1.0f);
}

TEST(CompareTest, DecodesIndexKeys) {
  std::vector<float> bytes(68, 0.0f);
  bytes[0] = 0x72;   // Low nibble 2: 1.0 at index 0; high nibble 7: 6.0 at index 1.
  bytes[16] = 0x0a;  // -1.0 at index 32, under the second scale.
  bytes[64] = 127;   // 2^0
  bytes[65] = 129;   // 2^2
  const Tensor values = DecodeIndexKeys(Row(bytes, "U8"));
  EXPECT_EQ(values.shape, (std::vector<int64_t>{1, 128}));
  EXPECT_EQ(values.values[0], 1.0f);
  EXPECT_EQ(values.values[1], 6.0f);
  EXPECT_EQ(values.values[32], -4.0f);
}

TEST(CompareTest, ReadsTheBundledGoldenFiles) {
  const auto set = ReadTensorSet(ISTHMUS_SOURCE_DIR
                                 "/tests/golden/tiny-random-3layer/io/decode.math.safetensors");
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ(set->mode, "math");
  EXPECT_EQ(set->factor, 3.0);
  EXPECT_EQ(InputIds(*set).size(), 260u);
  EXPECT_GT(set->floors.size(), 10u);
  EXPECT_EQ(set->Find("logits")->shape, (std::vector<int64_t>{10, 512}));
  EXPECT_TRUE(Compare(*set, *set).passed()) << Compare(*set, *set).Report();
}

}  // namespace
}  // namespace isthmus::fidelity
