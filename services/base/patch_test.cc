// SPDX-License-Identifier: Apache-2.0
// Patch sets: defaults, configuration and refusals.
#include "services/base/patch.h"

#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace isthmus {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr Patch kOn = {.name = "rms_norm.row_per_warp",
                       .summary = "One warp normalises one row.",
                       .phases = kPhaseDecode,
                       .default_on = true,
                       .bound = {},
                       .test = "RmsNormVariantTest",
                       .decision = "kernels/decisions/none.md"};
constexpr Patch kOff = {.name = "attention.split_kv",
                        .summary = "Several blocks share one query.",
                        .phases = kPhaseDecode | kPhasePrefill,
                        .default_on = false,
                        .bound = {},
                        .test = "AttentionVariantTest",
                        .decision = "kernels/decisions/none.md"};
constexpr const Patch* kKnown[] = {&kOn, &kOff};

TEST(PatchSetTest, StartsFromTheDefaults) {
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve(kKnown, {});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_TRUE(set->IsOn(kOn));
  EXPECT_FALSE(set->IsOn(kOff));
}

TEST(PatchSetTest, LetsTheConfigurationDecide) {
  const absl::StatusOr<PatchSet> set =
      PatchSet::Resolve(kKnown, {{"rms_norm.row_per_warp", false}, {"attention.split_kv", true}});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_FALSE(set->IsOn(kOn));
  EXPECT_TRUE(set->IsOn(kOff));
}

TEST(PatchSetTest, SaysWhatIsOnAndWhy) {
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve(kKnown, {{"attention.split_kv", true}});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->Describe(),
              ElementsAre("rms_norm.row_per_warp on (default)", "attention.split_kv on (config)"));
}

TEST(PatchSetTest, RefusesAnUnknownNameAndListsTheKnownOnes) {
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve(kKnown, {{"attention.split_k", true}});
  EXPECT_EQ(set.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(set.status().message()), HasSubstr("\"attention.split_k\""));
  EXPECT_THAT(std::string(set.status().message()),
              HasSubstr("[rms_norm.row_per_warp, attention.split_kv]"));
}

TEST(PatchSetTest, RefusesAnUnknownNameThatIsSwitchedOff) {
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve(kKnown, {{"no.such", false}});
  EXPECT_EQ(set.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PatchSetTest, RefusesTwoPatchesOfOneName) {
  const Patch twin = kOn;
  const Patch* const known[] = {&kOn, &twin};
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve(known, {});
  EXPECT_EQ(set.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(set.status().message()), HasSubstr("rms_norm.row_per_warp"));
}

TEST(PatchSetTest, GivesTheDefaultOfAPatchItDoesNotKnow) {
  const absl::StatusOr<PatchSet> set = PatchSet::Resolve({}, {});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_THAT(set->Describe(), IsEmpty());
  EXPECT_TRUE(set->IsOn(kOn));
  EXPECT_FALSE(set->IsOn(kOff));
}

TEST(PatchSetTest, IsAValueThatCopiesKeep) {
  const absl::StatusOr<PatchSet> set =
      PatchSet::Resolve(kKnown, {{"rms_norm.row_per_warp", false}});
  ASSERT_TRUE(set.ok()) << set.status();
  const PatchSet copy = *set;
  EXPECT_FALSE(copy.IsOn(kOn));
}

}  // namespace
}  // namespace isthmus
