// SPDX-License-Identifier: Apache-2.0
#include "services/base/prefix_hash.h"

#include <numeric>
#include <string>
#include <unordered_set>

#include "gtest/gtest.h"

namespace isthmus {
namespace {

std::vector<int32_t> Counting(int64_t size, int32_t first = 0) {
  std::vector<int32_t> tokens(static_cast<size_t>(size));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

std::vector<PrefixHash> ChainOf(const PrefixHash& root, const std::vector<int32_t>& tokens) {
  std::vector<PrefixHash> chain;
  ExtendChain(root, tokens, chain);
  return chain;
}

TEST(PrefixHashTest, IsXxh3OfAllBytesInOrder) {
  // The empty salt with zeros: XXH3-128 of 16 zero bytes. Names may lie in files, so they stay.
  const PrefixHash root = PrefixRoot("", 0, 0);
  EXPECT_EQ(root.high, 0xe5189a9599e3f862) << std::hex << root.high;
  EXPECT_EQ(root.low, 0x05ea23ef06e28b2d) << std::hex << root.low;
}

TEST(PrefixHashTest, RootsDifferByEverythingThatTheyAreMadeOf) {
  const PrefixHash root = PrefixRoot("tenant", 1, 2);
  EXPECT_EQ(PrefixRoot("tenant", 1, 2), root);
  EXPECT_NE(PrefixRoot("tenanu", 1, 2), root);
  EXPECT_NE(PrefixRoot("", 1, 2), root);
  EXPECT_NE(PrefixRoot("tenant", 2, 2), root);
  EXPECT_NE(PrefixRoot("tenant", 1, 3), root);
  EXPECT_NE(PrefixRoot("tenant", 2, 1), root);
  // A salt may hold any byte, zeros too.
  EXPECT_NE(PrefixRoot(absl::string_view("a\0", 2), 1, 2), PrefixRoot("a", 1, 2));
}

TEST(PrefixHashTest, AChainHasOneNameForEachWholeBlock) {
  const PrefixHash root = PrefixRoot("", 7, 8);
  EXPECT_TRUE(ChainOf(root, Counting(127)).empty());
  EXPECT_EQ(ChainOf(root, Counting(128)).size(), 1u);
  EXPECT_EQ(ChainOf(root, Counting(383)).size(), 2u);
  EXPECT_EQ(ChainOf(root, Counting(383))[0], ChainOf(root, Counting(128))[0]);
}

TEST(PrefixHashTest, GrowingAChainGivesTheNamesOfTheWhole) {
  const PrefixHash root = PrefixRoot("", 7, 8);
  const std::vector<int32_t> tokens = Counting(1000);
  std::vector<PrefixHash> chain;
  for (size_t size = 0; size <= tokens.size(); size += 50) {
    ExtendChain(root, std::span(tokens).first(size), chain);
  }
  EXPECT_EQ(chain, ChainOf(root, tokens));
}

TEST(PrefixHashTest, OneTokenChangesItsBlockAndAllBehindIt) {
  const PrefixHash root = PrefixRoot("", 7, 8);
  const std::vector<int32_t> tokens = Counting(512);
  const std::vector<PrefixHash> chain = ChainOf(root, tokens);
  for (const size_t at : {0u, 127u, 128u, 300u, 511u}) {
    std::vector<int32_t> other = tokens;
    other[at] ^= 1;
    const std::vector<PrefixHash> changed = ChainOf(root, other);
    for (size_t b = 0; b < chain.size(); ++b) EXPECT_EQ(changed[b] == chain[b], b < at / 128) << at;
  }
}

TEST(PrefixHashTest, TheSameBlockAtAnotherPlaceHasAnotherName) {
  const std::vector<int32_t> same(128 * 100, 5);
  std::unordered_set<PrefixHash, PrefixHashBits> names;
  for (const PrefixHash& name : ChainOf(PrefixRoot("", 1, 1), same)) names.insert(name);
  EXPECT_EQ(names.size(), 100u);
}

}  // namespace
}  // namespace isthmus
