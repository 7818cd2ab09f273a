// SPDX-License-Identifier: Apache-2.0
// Stop strings by hand, and against a search of the whole text under every cut into pieces.
#include "services/text/stop_strings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

struct Found {
  std::string text;
  std::optional<std::string> match;
  bool operator==(const Found&) const = default;
};

void PrintTo(const Found& found, std::ostream* out) {
  *out << '"' << found.text << "\", match \"" << found.match.value_or("none") << '"';
}

Found Scan(const std::vector<std::string>& stops, const std::vector<std::string>& pieces,
           bool keeps_match = false) {
  StopStrings scanner(stops, keeps_match);
  Found found;
  for (const std::string& piece : pieces) found.text += scanner.Push(piece);
  found.text += scanner.Finish();
  found.match = scanner.match();
  return found;
}

// The definition: the shortest prefix of the text that ends with a string, the longest one.
Found Search(const std::vector<std::string>& stops, const std::string& text, bool keeps_match) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<std::string> best;
    for (const std::string& stop : stops) {
      if (end < stop.size() || text.compare(end - stop.size(), stop.size(), stop) != 0) continue;
      if (!best.has_value() || stop.size() > best->size()) best = stop;
    }
    if (best.has_value()) return {text.substr(0, keeps_match ? end : end - best->size()), best};
  }
  return {text, std::nullopt};
}

TEST(StopStringsTest, EndTheTextBeforeTheFirstOneThatIsComplete) {
  EXPECT_EQ(Scan({"stop"}, {"go on, stop here"}), (Found{"go on, ", "stop"}));
  EXPECT_EQ(Scan({"abcd", "bc"}, {"xabcdy"}), (Found{"xa", "bc"}));
  EXPECT_EQ(Scan({"c", "abc", "bc"}, {"xabcdy"}), (Found{"x", "abc"}));
  EXPECT_EQ(Scan({"stop"}, {"sto"}), (Found{"sto", std::nullopt}));
  EXPECT_EQ(Scan({}, {"any", "thing"}), (Found{"anything", std::nullopt}));
}

TEST(StopStringsTest, MayStayInTheText) {
  EXPECT_EQ(Scan({"\n\n"}, {"a\n", "\nb"}, true), (Found{"a\n\n", "\n\n"}));
}

TEST(StopStringsTest, HoldBackNoMoreThanWhatMayBeginOne) {
  StopStrings scanner({"aab", "xyz"});
  EXPECT_EQ(scanner.Push("1aa"), "1");
  EXPECT_EQ(scanner.Push("a"), "a");  // "aa" may begin "aab".
  EXPECT_EQ(scanner.Push("c"), "aac");
  EXPECT_EQ(scanner.Push("xy"), "");
  EXPECT_EQ(scanner.Push("b"), "xyb");
  EXPECT_EQ(scanner.Push("xyz tail"), "");
  EXPECT_EQ(scanner.match(), "xyz");
  EXPECT_EQ(scanner.Push("more"), "");
  EXPECT_EQ(scanner.Finish(), "");
}

TEST(StopStringsTest, AreNotCompleteWhereTheyMayNotBe) {
  StopStrings scanner({"abab"});
  EXPECT_EQ(scanner.Push("abab", false), "ab");  // "ab" may begin another one.
  EXPECT_EQ(scanner.match(), std::nullopt);
  EXPECT_EQ(scanner.Push("ab"), "");
  EXPECT_EQ(scanner.match(), "abab");
}

TEST(StopStringsTest, NeverCutACharacter) {
  // The first bytes of all three are the same.
  const std::vector<std::string> stops = {"\u00e9t\u00e9", "\U0001F600!"};
  const std::string text = "\u00e8 \u00e9t\u00e8 \U0001F601! \U0001F600 \u00e9t\u00e9 end";
  StopStrings scanner(stops);
  std::string all;
  size_t offset = 0;
  while (offset < text.size()) {
    const Utf8Step step = NextUtf8(text, offset);
    ASSERT_EQ(step.kind, Utf8Kind::kCharacter);
    const std::string certain = scanner.Push(text.substr(offset, step.size));
    EXPECT_TRUE(!FirstInvalidUtf8(certain).has_value());
    all += certain;
    offset += step.size;
  }
  EXPECT_EQ((Found{all, scanner.match()}), Search(stops, text, false));
  EXPECT_EQ(all, "\u00e8 \u00e9t\u00e8 \U0001F601! \U0001F600 ");
}

// Every cut of a short text into two and three pieces, and single bytes.
TEST(StopStringsTest, FindTheSameUnderEveryCut) {
  for (uint32_t seed = 1; seed <= 400; ++seed) {
    std::mt19937 random(seed);
    const auto word = [&](size_t most) {
      std::string text(1 + random() % most, 'a');
      for (char& c : text) c = static_cast<char>('a' + random() % 2);
      return text;
    };
    std::vector<std::string> stops;
    for (uint32_t i = 0; i < 1 + random() % 4; ++i) stops.push_back("b" + word(6));
    const std::string text = word(24);
    const bool keeps_match = random() % 2 == 0;
    const Found expected = Search(stops, text, keeps_match);
    for (size_t i = 0; i <= text.size(); ++i) {
      for (size_t j = i; j <= text.size(); ++j) {
        ASSERT_EQ(
            Scan(stops, {text.substr(0, i), text.substr(i, j - i), text.substr(j)}, keeps_match),
            expected)
            << text << ", cut at " << i << " and " << j;
      }
    }
    std::vector<std::string> bytes;
    for (const char c : text) bytes.emplace_back(1, c);
    ASSERT_EQ(Scan(stops, bytes, keeps_match), expected) << text;
  }
}

}  // namespace
}  // namespace isthmus::text
