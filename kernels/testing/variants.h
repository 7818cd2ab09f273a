// SPDX-License-Identifier: Apache-2.0
// The rows of a table of variants that a test can run: those of the CPU, or those of the device
// that is there.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/core/device.h"
#include "kernels/core/exec.h"

namespace isthmus::kernels::testing {

template <typename Variant>
std::vector<Variant> CpuVariants(std::span<const Variant> table) {
  std::vector<Variant> out;
  for (const Variant& variant : table) {
    if (variant.arches.begin == kArchCpu) out.push_back(variant);
  }
  return out;
}

// Compiled in; whether the device at hand can run it is CanRunHere's answer, at run time.
template <typename Variant>
std::vector<Variant> DeviceVariants(std::span<const Variant> table) {
  std::vector<Variant> out;
  for (const Variant& variant : table) {
    if (variant.arches.begin != kArchCpu && variant.launch != nullptr) out.push_back(variant);
  }
  return out;
}
template <typename Variant>
bool CanRunHere(const Variant& variant, const Exec& exec) {
  return exec.arch >= variant.arches.begin && exec.arch < variant.arches.end;
}

// "trusted", or the patch's name with its point as an underscore.
template <typename Variant>
std::string VariantName(const ::testing::TestParamInfo<Variant>& param) {
  if (param.param.patch == nullptr) return "trusted";
  std::string name(param.param.patch->name);
  for (char& c : name) {
    if (c == '.') c = '_';
  }
  return name;
}

}  // namespace isthmus::kernels::testing
