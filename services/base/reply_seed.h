// SPDX-License-Identifier: Apache-2.0
// Seeds of several replies to one request.
#pragma once

#include <cstdint>

namespace isthmus {

// Of reply number `reply`: the request's own for the first, and others that it determines. No two
// replies of a seed have the same one, nor replies of neighbouring seeds in a row (the finaliser of
// SplitMix64; Steele, Lea and Flood, 2014).
inline uint64_t ReplySeed(uint64_t seed, uint32_t reply) {
  if (reply == 0) return seed;
  uint64_t bits = seed ^ (uint64_t{reply} * 0x9e3779b97f4a7c15u);
  bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
  bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
  return bits ^ (bits >> 31);
}

}  // namespace isthmus
