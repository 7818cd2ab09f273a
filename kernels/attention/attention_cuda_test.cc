// SPDX-License-Identifier: Apache-2.0
// Every CUDA variant of attention: within its bound over mixed batches, the ring committed with the
// bits of the CPU, the same bits again, unused cache harmless; the trusted one bit for bit the
// CPU's.
#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/attention/attention_batch.h"
#if ISTHMUS_EMULATED
#include "kernels/core/emulator/emulator.h"
#endif
#include "kernels/testing/compare.h"
#include "kernels/testing/variants.h"

namespace isthmus::kernels {

void PrintTo(const AttentionVariant& variant, std::ostream* os) {
  *os << (variant.patch != nullptr ? variant.patch->name : "trusted path");
}

namespace {

using testing::AttentionBatch;
using testing::AttentionSequence;
using Case = testing::AttentionBatchCase;
using testing::SameBits;
using testing::TestDevice;

constexpr Arithmetic kMath = Arithmetic::kMath;
constexpr Arithmetic kReference = Arithmetic::kReference;

std::vector<Case> Cases() {
  std::vector<Case> cases = {
      {"WindowMath", {5, 128, 64, 128, 0, kMath}, {{0, 1}, {200, 3}, {0, 0}, {127, 2}}, 0, 2},
      {"CsaMath", {3, 128, 64, 128, 4, kMath}, {{40, 1}, {300, 2}}, 16, 1},
      {"HcaOdd", {4, 192, 64, 128, 128, kReference}, {{400, 1}, {126, 3}}, 0, 0},
      {"SmallWindow", {2, 128, 64, 3, 4, kReference}, {{0, 20}, {50, 1}}, 5, 0},
      {"Window", {16, 512, 64, 128, 0, kReference}, {{0, 1}, {31, 1}, {500, 1}}, 0, 1},
      {"CsaTp8", {8, 512, 64, 128, 4, kReference}, {{10, 1}, {0, 0}, {2600, 1}}, 512, 2},
      {"CsaOddList", {24, 512, 64, 128, 4, kReference}, {{700, 1}, {70, 1}}, 77, 0},
      {"Hca", {32, 512, 64, 128, 128, kReference}, {{4000, 1}, {100, 1}}, 0, 0},
      {"CsaPrefill", {16, 512, 64, 128, 4, kReference}, {{0, 9}, {254, 5}}, 24, 1},
  };
  // More rows than blocks of 16 heads have room for: blocks of more heads, and several splits.
  const int64_t rows = testing::TestsRealShapes() ? 34 : 3;
  Case many = {"CsaRows", {64, 512, 64, 128, 4, kReference}, {}, 24, 1};
  Case half = {"HcaRows", {32, 512, 64, 128, 128, kReference}, {}, 0, 1};
  for (int64_t i = 0; i < rows; ++i)
    many.parts.push_back({testing::TestsRealShapes() ? 60 + 7 * i : 90 + 61 * i, 1});
  for (int64_t i = 0; i < 2 * rows; ++i)
    half.parts.push_back({testing::TestsRealShapes() ? 60 + 5 * i : 100 + 53 * i, 1});
  cases.push_back(many);
  cases.push_back(half);
  if (testing::TestsRealShapes()) {
    cases.push_back({"Csa64", {64, 512, 64, 128, 4, kReference}, {{10, 1}, {32000, 1}}, 512, 0});
    cases.push_back({"Csa2048", {64, 512, 64, 128, 4, kReference}, {{16000, 1}}, 2048, 0});
    cases.push_back({"LongHca", {64, 512, 64, 128, 128, kReference}, {{102400, 1}, {9, 1}}, 0, 3});
    cases.push_back({"Chunk", {64, 512, 64, 128, 4, kReference}, {{700, 150}, {0, 40}}, 512, 0});
  } else {
    cases.push_back({"Csa64", {64, 512, 64, 128, 4, kReference}, {{600, 1}}, 100, 0});
  }
  return cases;
}

class AttentionCudaTest : public ::testing::TestWithParam<std::tuple<AttentionVariant, Case>> {
 protected:
  void SetUp() override { ISTHMUS_REQUIRE_DEVICE(); }
  const AttentionVariant& variant() const { return std::get<0>(GetParam()); }
  bool Runs(AttentionBatch& batch) {
    return testing::CanRunHere(variant(), device_.exec()) && batch.IsSupported(variant());
  }
  const Exec& exec() { return device_.exec(); }

  TestDevice device_;
};

TEST_P(AttentionCudaTest, StaysWithinItsBoundAndRepeatsItsBits) {
  AttentionBatch batch(std::get<1>(GetParam()));
  if (!Runs(batch)) GTEST_SKIP() << "another variant's shape or architecture";
  const auto first = batch.RunOnDevice(variant(), exec());
  {
#if ISTHMUS_EMULATED
    const emulator::ReverseOrder reversed;
#endif
    const auto second = batch.RunOnDevice(variant(), exec());
    EXPECT_TRUE(SameBits(second.out, first.out));
    EXPECT_EQ(second.states, first.states);
  }

  const auto exact = batch.RunOnCpu(AttentionDefinition);
  const auto naive = batch.RunOnCpu(AttentionNaive);
  const auto cpu = batch.RunOnCpu(LaunchAttentionCpu);
  for (size_t i = 0; i < first.states.size(); ++i) {
    EXPECT_EQ(first.states[i], batch.sequence(i).cache().state_words()) << "ring " << i;
  }
  if (variant().patch == nullptr) {
    EXPECT_TRUE(SameBits(first.out, cpu));
    EXPECT_TRUE(testing::WithinBound(first.out, naive, exact));
  } else {
    EXPECT_TRUE(testing::WithinBound(first.out, naive, exact, variant().patch->bound));
  }
  // DeepSeek's measure of likeness, which is half of the squared relative error.
  const double error = testing::RelativeL2(first.out, exact);
  EXPECT_LE(error * error / 2, 5e-6);
}

TEST_P(AttentionCudaTest, TakesAndGivesBf16) {
  AttentionBatch batch(std::get<1>(GetParam()));
  if (!Runs(batch)) GTEST_SKIP() << "another variant's shape or architecture";
  for (size_t i = 0; i < std::get<1>(GetParam()).parts.size(); ++i) {
    for (float& value : batch.sequence(i).q) value = RoundBf16(value);
  }
  const auto wide = batch.RunOnDevice(variant(), exec());
  const auto narrow = batch.RunOnDevice(variant(), exec(), /*is_bf16=*/true);
  std::vector<float> rounded = wide.out;
  for (float& value : rounded) value = RoundBf16(value);
  EXPECT_TRUE(SameBits(narrow.out, rounded));
}

TEST_P(AttentionCudaTest, HasTheBitsOfARowAloneWhenTheBatchMustNotMatter) {
  const Case& c = std::get<1>(GetParam());
  AttentionBatch batch(c);
  if (!Runs(batch)) GTEST_SKIP() << "another variant's shape or architecture";
  device_.exec().batch_invariant = true;
  const auto together = batch.RunOnDevice(variant(), exec());
  size_t at = 0;
  for (size_t i = 0; i < c.parts.size(); ++i) {
    Case alone = c;
    alone.parts = {c.parts[i]};
    alone.padding_rows = 0;
    AttentionBatch one(alone, 40 + 20 * i);
    one.sequence(0).sink = batch.sequence(0).sink;
    const auto result = one.RunOnDevice(variant(), exec());
    const std::vector<float> part(
        together.out.begin() + static_cast<int64_t>(at),
        together.out.begin() + static_cast<int64_t>(at + result.out.size()));
    EXPECT_TRUE(SameBits(result.out, part)) << "sequence " << i;
    at += result.out.size();
  }
}

INSTANTIATE_TEST_SUITE_P(
    Table, AttentionCudaTest,
    ::testing::Combine(::testing::ValuesIn(testing::DeviceVariants(AttentionVariants())),
                       ::testing::ValuesIn(Cases())),
    [](const auto& test) {
      const AttentionVariant& variant = std::get<0>(test.param);
      std::string name(variant.patch != nullptr ? variant.patch->name : "trusted");
      std::replace(name.begin(), name.end(), '.', '_');
      return name + "_" + std::get<1>(test.param).name;
    });

class AttentionCacheTest : public ::testing::TestWithParam<AttentionVariant> {};

TEST_P(AttentionCacheTest, UnusedPartsDoNotReachTheResult) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  const Case c = {"", {8, 512, 64, 128, 4, kReference}, {{300, 1}, {40, 1}}, 40, 1};
  AttentionBatch clean(c);
  AttentionBatch poisoned(c);
  if (!testing::CanRunHere(GetParam(), device.exec()) || !clean.IsSupported(GetParam())) {
    GTEST_SKIP() << "another variant's shape or architecture";
  }
  for (size_t i = 0; i < c.parts.size(); ++i) {
    AttentionSequence& one = poisoned.sequence(i);
    const int64_t position = c.parts[i].start;
    const PagedEntries entries = one.cache().Entries(one.kind(), one.entry_plane());
    const int32_t* selected = one.selected.data() + position * c.max_selected;
    for (int32_t j = 0; j < VisibleEntries(position, 4); ++j) {
      if (std::find(selected, selected + c.max_selected, j) != selected + c.max_selected) continue;
      std::fill_n(entries.data(j), one.entry_plane().data_bytes, std::byte{0xff});
      std::fill_n(entries.scale(j), one.entry_plane().scale_bytes, std::byte{0xff});
    }
  }
  const auto expected = clean.RunOnDevice(GetParam(), device.exec());
  const auto got = poisoned.RunOnDevice(GetParam(), device.exec());
  EXPECT_TRUE(SameBits(got.out, expected.out));
}

// As in a pool of more than 2^32 bytes.
TEST_P(AttentionCacheTest, HasOffsetsOfMoreThan32Bits) {
  ISTHMUS_REQUIRE_DEVICE();
  TestDevice device;
  AttentionBatch batch({"", {8, 512, 64, 128, 4, kReference}, {{300, 1}, {40, 2}}, 40, 1});
  if (!testing::CanRunHere(GetParam(), device.exec()) || !batch.IsSupported(GetParam())) {
    GTEST_SKIP() << "another variant's shape or architecture";
  }
  const auto near = batch.RunOnDevice(GetParam(), device.exec());
  const auto far = batch.RunOnDevice(GetParam(), device.exec(), false, testing::kFarShift);
  EXPECT_TRUE(SameBits(far.out, near.out));
  EXPECT_EQ(far.states, near.states);
}

INSTANTIATE_TEST_SUITE_P(Table, AttentionCacheTest,
                         ::testing::ValuesIn(testing::DeviceVariants(AttentionVariants())),
                         testing::VariantName<AttentionVariant>);

}  // namespace
}  // namespace isthmus::kernels
