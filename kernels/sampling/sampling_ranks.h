// SPDX-License-Identifier: Apache-2.0
// What the CPU variants of sampling share: how logits are ordered, and the draw from those that
// are. Internal to this folder.
#pragma once

#include <bit>
#include <compare>
#include <cstdint>
#include <limits>

#include "kernels/sampling/sampling.h"

namespace isthmus::kernels {

inline constexpr float kNoFiniteLogit = -std::numeric_limits<float>::infinity();

// In ascending order: the larger logit first, among equals the smaller id.
struct Ranked {
  uint32_t key = 0;
  int32_t id = 0;
  auto operator<=>(const Ranked&) const = default;
};

inline uint32_t DescendingKey(float logit) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0: they are equal.
  return (bits & 0x80000000u) != 0 ? bits : bits ^ 0x7fffffffu;
}

// The largest finite one of `n` logits, or kNoFiniteLogit.
float LargestFinite(const float* logits, int64_t n);

// Sorts `items`, which are in ascending order of id; `scratch` holds as many. The result is in
// `scratch`.
void SortRanked(Ranked* items, Ranked* scratch, int64_t n);

// The drawn token among `n` ranked ones with these masses; the first mass is 1.
int32_t DrawRanked(const SamplingArgs& args, const Ranked* ranked, const float* mass, int64_t n);

}  // namespace isthmus::kernels
