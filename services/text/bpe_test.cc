// SPDX-License-Identifier: Apache-2.0
// Merge order against a definition that follows the sentence in bpe.h.
#include "services/text/bpe.h"

#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <random>

namespace isthmus::text {
namespace {

using Rules = std::map<std::pair<int32_t, int32_t>, std::pair<int32_t, int32_t>>;

// Merges the leftmost pair of lowest rank until none is left.
std::vector<int32_t> BpeDefinition(const Rules& rules, std::vector<int32_t> symbols) {
  while (true) {
    size_t best = symbols.size();
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto rule = rules.find({symbols[i], symbols[i + 1]});
      if (rule == rules.end()) continue;
      if (best == symbols.size() ||
          rule->second.first < rules.at({symbols[best], symbols[best + 1]}).first) {
        best = i;
      }
    }
    if (best == symbols.size()) return symbols;
    symbols[best] = rules.at({symbols[best], symbols[best + 1]}).second;
    symbols.erase(symbols.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}

TEST(BpeTest, AgreesWithTheDefinitionOnRandomRules) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    Bpe bpe;
    Rules rules;
    for (int byte = 0; byte < 4; ++byte) bpe.SetByteToken(static_cast<uint8_t>(byte), byte);
    for (int32_t rank = 0; rank < 30; ++rank) {
      const int32_t merged = 4 + rank;
      const auto left = static_cast<int32_t>(random() % static_cast<uint32_t>(merged));
      const auto right = static_cast<int32_t>(random() % static_cast<uint32_t>(merged));
      if (!rules.try_emplace({left, right}, rank, merged).second) continue;
      ASSERT_TRUE(bpe.AddMerge(left, right, rank, merged).ok());
    }
    std::string piece(2 + random() % 60, '\0');
    for (char& c : piece) c = static_cast<char>(random() % 4);
    PieceCache cache;
    std::vector<int32_t> ids;
    bpe.Encode(piece, &cache, &ids);
    EXPECT_EQ(ids, BpeDefinition(rules, {piece.begin(), piece.end()})) << "trial " << trial;
    std::vector<int32_t> again;
    bpe.Encode(piece, &cache, &again);
    EXPECT_EQ(again, ids);
  }
}

TEST(BpeTest, RefusesTwoRulesForOnePair) {
  Bpe bpe;
  ASSERT_TRUE(bpe.AddMerge(1, 2, 0, 3).ok());
  EXPECT_EQ(bpe.AddMerge(1, 2, 5, 3).message(), "merge 5 of tokens 1 and 2 repeats merge 0");
}

TEST(BpeTest, IsNotQuadraticInThePiece) {
  Bpe bpe;
  bpe.SetByteToken('a', 0);
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(bpe.AddMerge(i, i, i, i + 1).ok());
  PieceCache cache;
  std::vector<int32_t> ids;
  const auto start = std::chrono::steady_clock::now();
  bpe.Encode(std::string(1 << 20, 'a'), &cache, &ids);
  const auto elapsed = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(ids, std::vector<int32_t>{20});
  // A quadratic algorithm needs 10^12 steps; this one takes about 0.3 s.
  EXPECT_LT(elapsed, std::chrono::seconds(30));
}

}  // namespace
}  // namespace isthmus::text
