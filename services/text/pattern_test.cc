// SPDX-License-Identifier: Apache-2.0
// Which regex constructs pass, and how stages split.
#include "services/text/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/text/pre_tokenizer.h"

namespace isthmus::text {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(PatternTest, ReplacesWhiteSpaceClasses) {
  EXPECT_EQ(*TranslatePattern(R"(\s+(?!\S)|[\sa]{1,3})"),
            R"(\p{White_Space}+(?!\P{White_Space})|[\p{White_Space}a]{1,3})");
}

TEST(PatternTest, PassesTheStagesOfDeepSeek) {
  for (const char* pattern : {"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
                              R"([!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+)"}) {
    EXPECT_EQ(*TranslatePattern(pattern), pattern);
  }
}

TEST(PatternTest, AddsNewCharactersToCategories) {
  // Unicode 15 to 16 gained ten runs of numbers; no separators.
  EXPECT_THAT(*TranslatePattern(R"(\p{N}{1,3})"),
              AllOf(StartsWith(R"([\p{N}\x{10d40}-\x{10d49})"), EndsWith("]{1,3}")));
  EXPECT_THAT(*TranslatePattern(R"([^a\p{N}])"), StartsWith(R"([^a\p{N}\x{10d40}-)"));
  EXPECT_THAT(*TranslatePattern(R"(\P{N})"), StartsWith(R"([^\p{N}\x{10d40}-)"));
  EXPECT_EQ(*TranslatePattern(R"(\p{Z})"), R"([\p{Z}])");
}

TEST(PatternTest, RefusesWhatDiffersBetweenDialects) {
  for (const char* pattern :
       {R"(\h)",  R"(\d)",   R"(\w)",   R"(\b)",       "a.",    "^a",     "a$",         "a++",
        "a+?",    "a{1,3}+", "a{,3}",   "a{65}",       "(a)",   "(?i:a)", "(?<=a)b",    "[a[b]]",
        "[a&&b]", "[]a]",    "[a",      "a{",          "a}",    "a]",     R"(\p{Han})", R"(\p{C})",
        R"(\pL)", "\\",      R"(\x41)", "[[:alpha:]]", R"(\1)", "(*UTF)"}) {
    const auto translated = TranslatePattern(pattern);
    ASSERT_FALSE(translated.ok()) << pattern << " -> " << *translated;
    EXPECT_EQ(translated.status().code(), absl::StatusCode::kUnimplemented) << pattern;
  }
  EXPECT_THAT(TranslatePattern("ab(?i:c)").status().message(),
              HasSubstr("regex construct '(?i' at byte 2 of 8"));
  EXPECT_FALSE(TranslatePattern(std::string(5000, 'a')).ok());
}

std::vector<absl::string_view> Split(const std::vector<std::string>& patterns,
                                     absl::string_view text) {
  std::vector<absl::string_view> pieces;
  const auto pre_tokenizer = PreTokenizer::Create(patterns, true);
  EXPECT_TRUE(pre_tokenizer.ok()) << pre_tokenizer.status();
  if (pre_tokenizer.ok()) {
    EXPECT_TRUE(pre_tokenizer->Split(text, &pieces).ok());
  }
  return pieces;
}

TEST(PreTokenizerTest, KeepsMatchesAndGaps) {
  EXPECT_THAT(Split({R"(\p{N}{1,3})"}, "a12345b"), ElementsAre("a", "123", "45", "b"));
  EXPECT_THAT(Split({R"(\p{N}{1,3})"}, ""), ElementsAre());
  EXPECT_THAT(Split({}, "x"), ElementsAre("x"));
}

TEST(PreTokenizerTest, EndsTheViewOfAStageAtItsPiece) {
  // In the whole text the blanks are followed by a digit; in their own piece by nothing.
  EXPECT_THAT(Split({R"(\p{N}{1,3})", R"(\s+(?!\S)|\s+)"}, "  1"), ElementsAre("  ", "1"));
  EXPECT_THAT(Split({R"(\s+(?!\S)|\s+)"}, "  1"), ElementsAre(" ", " ", "1"));
}

TEST(PreTokenizerTest, DoesNotCountTheMongolianVowelSeparatorAsSpace) {
  EXPECT_THAT(Split({R"(\s+)"}, "a\u180e\u2003b"), ElementsAre("a\u180e", "\u2003", "b"));
}

TEST(PreTokenizerTest, KnowsCharactersOfUnicode16) {
  // U+1C89 CYRILLIC CAPITAL LETTER TJE (16.0), U+31350 a CJK ideograph (15.0), U+10D40 a digit.
  EXPECT_THAT(Split({R"([\p{L}\p{M}]+)"}, "a\u1C89\U00031350.\u1B4E"),
              ElementsAre("a\u1C89\U00031350", ".\u1B4E"));
  EXPECT_THAT(Split({R"(\p{N})"}, "1\U00010D40"), ElementsAre("1", "\U00010D40"));
}

TEST(PreTokenizerTest, RefusesPatternsItCannotUse) {
  const auto empty = PreTokenizer::Create({"a*"}, false);
  EXPECT_EQ(empty.status().message(), "regex can match the empty text");
  const auto broken = PreTokenizer::Create({"(?:a"}, false);
  EXPECT_EQ(broken.status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PreTokenizerTest, SplitsLongRunsInTime) {
  const std::string blanks(1 << 20, ' ');
  EXPECT_THAT(Split({R"(\s*[\r\n]+|\s+(?!\S)|\s+)"}, blanks), ElementsAre(blanks));
  EXPECT_EQ(Split({R"([\p{L}\p{M}]+)"}, std::string(1 << 20, 'a')).size(), 1u);
}

}  // namespace
}  // namespace isthmus::text
