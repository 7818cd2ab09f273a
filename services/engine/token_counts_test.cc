// SPDX-License-Identifier: Apache-2.0
// Counts against counting everything anew, whatever the pieces that the tokens come in.
#include "services/engine/token_counts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace isthmus::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Mention = kernels::TokenMention;

constexpr int64_t kVocab = 300;

std::vector<Mention> CountedAnew(std::span<const int32_t> tokens, size_t num_prompt) {
  std::vector<Mention> mentions;
  for (int32_t id = 0; id < kVocab; ++id) {
    if (std::ranges::count(tokens, id) == 0) continue;
    const auto output = tokens.subspan(std::min(num_prompt, tokens.size()));
    mentions.push_back({id, static_cast<int32_t>(std::ranges::count(output, id))});
  }
  return mentions;
}

absl::Status Count(std::span<const int32_t> tokens, int64_t num_prompt, TokenCounts& counts) {
  return CountTokens(tokens, num_prompt, kVocab, nullptr, counts);
}

TEST(TokenCountsTest, TellsThePromptFromTheOutput) {
  TokenCounts counts;
  ASSERT_TRUE(Count(std::vector<int32_t>{7, 3, 7}, 3, counts).ok());
  EXPECT_THAT(counts.mentions, ElementsAre(Mention{3, 0}, Mention{7, 0}));
  ASSERT_TRUE(Count(std::vector<int32_t>{7, 3, 7, 7, 0, 7}, 3, counts).ok());
  EXPECT_THAT(counts.mentions, ElementsAre(Mention{0, 1}, Mention{3, 0}, Mention{7, 2}));
}

TEST(TokenCountsTest, DoNotDependOnThePiecesThatTokensComeIn) {
  std::mt19937 random(20);
  for (int round = 0; round < 60; ++round) {
    std::vector<int32_t> tokens(1 + random() % 700);
    for (int32_t& id : tokens) id = static_cast<int32_t>(random() % kVocab * (random() % 3) / 2);
    const size_t num_prompt = 1 + random() % tokens.size();
    const size_t largest_piece = round % 3 == 0 ? 3 : 200;  // One by one, and in a table.
    TokenCounts counts;
    // The first look may come with the prompt's end or at any later token.
    for (size_t size = num_prompt; size < tokens.size(); size += 1 + random() % largest_piece) {
      ASSERT_TRUE(Count(std::span(tokens).first(size), num_prompt, counts).ok());
      ASSERT_EQ(counts.mentions, CountedAnew(std::span(tokens).first(size), num_prompt)) << size;
    }
    ASSERT_TRUE(Count(tokens, num_prompt, counts).ok());
    ASSERT_EQ(counts.mentions, CountedAnew(tokens, num_prompt));
    EXPECT_EQ(counts.num_counted, static_cast<int64_t>(tokens.size()));
  }
}

TEST(TokenCountsTest, HoldWhatIsPlannedAndNoMore) {
  std::vector<int32_t> tokens(static_cast<size_t>(3 * kVocab));
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i % kVocab);
  TokenCounts counts;
  kernels::Workspace workspace;
  ASSERT_TRUE(CountTokens(std::span(tokens).first(10), 5, kVocab, &workspace, counts).ok());
  EXPECT_EQ(workspace.peak_bytes(), 0);
  const Mention* const place = counts.mentions.data();
  ASSERT_TRUE(CountTokens(tokens, 5, kVocab, &workspace, counts).ok());
  EXPECT_EQ(workspace.peak_bytes(), CountScratchBytes(kVocab));
  EXPECT_EQ(counts.mentions.data(), place);  // It never grew.
  EXPECT_EQ(static_cast<int64_t>(counts.mentions.capacity() * sizeof(Mention)),
            TokenCountsBytes(kVocab));
  EXPECT_EQ(counts.mentions.size(), static_cast<size_t>(kVocab));
}

TEST(TokenCountsTest, RefuseATokenOutsideTheVocabularyAndCountNothing) {
  for (const int32_t bad : {-1, static_cast<int32_t>(kVocab)}) {
    TokenCounts counts;
    const absl::Status status = Count(std::vector<int32_t>{3, bad}, 1, counts);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("token 1 has id"));
    EXPECT_THAT(counts.mentions, IsEmpty());
    EXPECT_EQ(counts.num_counted, 0);
  }
}

}  // namespace
}  // namespace isthmus::engine
