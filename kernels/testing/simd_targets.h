// SPDX-License-Identifier: Apache-2.0
// Runs a test once per compiled SIMD target. A target that this processor lacks is skipped and
// shows as such in the count of skipped tests.
//
//   using FooTargetTest = isthmus::kernels::testing::SimdTargetTest;
//   TEST_P(FooTargetTest, GivesTheBitsOfTheScalarForm) { ... }
//   ISTHMUS_INSTANTIATE_SIMD_TARGETS(FooTargetTest);
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <hwy/targets.h>  // Not highway.h, which must come after foreach_target.h.

#include "gtest/gtest.h"

namespace isthmus::kernels::testing {

// Bits of HWY_TARGETS, best first.
inline std::vector<int64_t> CompiledTargets() {
  std::vector<int64_t> out;
  for (int64_t rest = HWY_TARGETS; rest != 0; rest &= rest - 1) out.push_back(rest & -rest);
  return out;
}

inline bool CpuHasTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(0);
  return (hwy::SupportedTargets() & target) != 0;
}

// From now on dynamic dispatch goes to `target`; 0: to the best one again.
inline void ForceTarget(int64_t target) {
  hwy::SetSupportedTargetsForTest(target);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Calls f() under every compiled target that the processor has; returns how many those are, so that
// a test can refuse to pass on none.
template <typename Function>
int ForEachTarget(const Function& f) {
  int count = 0;
  for (const int64_t target : CompiledTargets()) {
    if (!CpuHasTarget(target)) continue;
    ForceTarget(target);
    f();
    ++count;
  }
  ForceTarget(0);
  return count;
}

class SimdTargetTest : public ::testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    if (!CpuHasTarget(GetParam())) GTEST_SKIP() << "needs " << hwy::TargetName(GetParam());
    ForceTarget(GetParam());
  }
  void TearDown() override { ForceTarget(0); }
};

inline std::string SimdTargetName(const ::testing::TestParamInfo<int64_t>& info) {
  return hwy::TargetName(info.param);
}

}  // namespace isthmus::kernels::testing

#define ISTHMUS_INSTANTIATE_SIMD_TARGETS(Suite)                                                 \
  INSTANTIATE_TEST_SUITE_P(Target, Suite,                                                       \
                           ::testing::ValuesIn(::isthmus::kernels::testing::CompiledTargets()), \
                           ::isthmus::kernels::testing::SimdTargetName)
