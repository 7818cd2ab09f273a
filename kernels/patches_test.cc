// SPDX-License-Identifier: Apache-2.0
#include "kernels/patches.h"

#include <gtest/gtest.h>

#include "services/base/patch.h"

namespace isthmus::kernels {
namespace {

bool IsOn(const PatchSet& set, absl::string_view name) {
  for (const Patch* patch : AllPatches()) {
    if (patch->name == name) return set.IsOn(*patch);
  }
  ADD_FAILURE() << "no patch is called " << name;
  return false;
}

TEST(InvariantDefaultsTest, AreOffWhereFewRowsRoundAnotherWay) {
  const auto set = ResolvePatches({}, /*batch_invariant=*/true);
  ASSERT_TRUE(set.ok()) << set.status();
  for (const Patch* patch : AllPatches()) {
    const bool serves_both =
        (patch->phases & kPhasePrefill) != 0 && (patch->phases & kPhaseDecode) != 0;
    if (serves_both || patch->bound.numeric_class == NumericClass::kBitExact) continue;
    EXPECT_FALSE(set->IsOn(*patch)) << patch->name;
  }
  EXPECT_FALSE(IsOn(*set, "linear.swap_ab"));
  EXPECT_TRUE(IsOn(*set, "experts.grouped_w4a8"));
}

TEST(InvariantDefaultsTest, GiveWayToTheConfiguration) {
  const auto set = ResolvePatches({{"linear.swap_ab", true}, {"compressor.fused_insert", false}},
                                  /*batch_invariant=*/true);
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_TRUE(IsOn(*set, "linear.swap_ab"));
  EXPECT_FALSE(IsOn(*set, "compressor.fused_insert"));
  EXPECT_FALSE(IsOn(*set, "attention.split_mma"));
}

}  // namespace
}  // namespace isthmus::kernels
