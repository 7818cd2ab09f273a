// SPDX-License-Identifier: Apache-2.0
// Streaming gives what decoding all bytes with errors="replace" would give.
#include "services/text/detokenizer.h"

#include <gtest/gtest.h>

#include <random>

#include "services/text/testing_tokenizer.h"
#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

std::unique_ptr<Tokenizer> Small() {
  return *Tokenizer::FromJson(SmallTokenizer({{"h", "e"}}, {"<x>"}).dump());  // 256 he, 257 <x>
}

TEST(DetokenizerTest, HoldsBackHalfACharacter) {
  const auto tokenizer = Small();
  Detokenizer detokenizer(tokenizer.get());
  EXPECT_EQ(detokenizer.Push(256), "he");
  EXPECT_EQ(detokenizer.Push(0xF0), "");
  EXPECT_EQ(detokenizer.Push(0x9F), "");
  EXPECT_EQ(detokenizer.Push(0x99), "");
  EXPECT_EQ(detokenizer.Push(0x82), "🙂");
  EXPECT_EQ(detokenizer.Finish(), "");
}

TEST(DetokenizerTest, ReplacesBytesOnceTheyAreProvenInvalid) {
  const auto tokenizer = Small();
  Detokenizer detokenizer(tokenizer.get());
  EXPECT_EQ(detokenizer.Push(0xE2), "");
  EXPECT_EQ(detokenizer.Push(0x82), "");
  EXPECT_EQ(detokenizer.Push('a'), "\uFFFDa");  // One maximal subpart: E2 82.
  EXPECT_EQ(detokenizer.Push(0x80), "\uFFFD");
  EXPECT_EQ(detokenizer.Push(0xF0), "");
  EXPECT_EQ(detokenizer.Push(0xF0), "\uFFFD");  // The second may still begin a character.
  EXPECT_EQ(detokenizer.Push(0x90), "");
  EXPECT_EQ(detokenizer.Finish(), "\uFFFD");
  EXPECT_EQ(detokenizer.Finish(), "");
  EXPECT_EQ(detokenizer.Push('b'), "b");
}

TEST(DetokenizerTest, SkipsSpecialTokensOnRequest) {
  const auto tokenizer = Small();
  Detokenizer keeps(tokenizer.get());
  EXPECT_EQ(keeps.Push(257), "<x>");
  Detokenizer skips(tokenizer.get(), true);
  EXPECT_EQ(skips.Push(0xC3), "");
  EXPECT_EQ(skips.Push(257), "");
  EXPECT_EQ(skips.Push(0xA9), "é");
  EXPECT_EQ(skips.Push(100000), "");
}

// The definition: all bytes at once.
std::string Replaced(absl::string_view bytes) {
  std::string out;
  for (size_t offset = 0; offset < bytes.size();) {
    const Utf8Step step = NextUtf8(bytes, offset);
    out += step.kind == Utf8Kind::kCharacter ? std::string(bytes.substr(offset, step.size))
                                             : std::string(kReplacement);
    offset += step.size;
  }
  return out;
}

TEST(DetokenizerTest, AgreesWithDecodingAllAtOnce) {
  const auto tokenizer = Small();
  static constexpr int kBytes[] = {'a', 0x80, 0x9F, 0xBF, 0xC3, 0xE0, 0xE2, 0xED, 0xF0, 0xF4, 0xFF};
  std::mt19937 random(3);
  for (int trial = 0; trial < 2000; ++trial) {
    Detokenizer detokenizer(tokenizer.get());
    std::string text;
    std::string bytes;
    for (int i = 0; i < 20; ++i) {
      const int byte = kBytes[random() % std::size(kBytes)];
      bytes.push_back(static_cast<char>(byte));
      const std::string part = detokenizer.Push(byte);
      EXPECT_EQ(FirstInvalidUtf8(part), std::nullopt);
      text += part;
    }
    EXPECT_EQ(text + detokenizer.Finish(), Replaced(bytes));
  }
}

}  // namespace
}  // namespace isthmus::text
