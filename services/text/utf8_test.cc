// SPDX-License-Identifier: Apache-2.0
// UTF-8 steps, by hand from table 3-7 and the examples of chapter 3.9 of the Unicode standard.
#include "services/text/utf8.h"

#include <gtest/gtest.h>

namespace isthmus::text {
namespace {

// Kinds and sizes of all steps of `bytes`: "C3" a character of 3 bytes, "I1" invalid, "P2" a
// prefix.
std::string Steps(absl::string_view bytes) {
  std::string out;
  for (size_t offset = 0; offset < bytes.size();) {
    const Utf8Step step = NextUtf8(bytes, offset);
    out += step.kind == Utf8Kind::kCharacter ? 'C' : step.kind == Utf8Kind::kInvalid ? 'I' : 'P';
    out += std::to_string(step.size);
    offset += step.size;
  }
  return out;
}

TEST(Utf8Test, ReadsWholeCharacters) {
  EXPECT_EQ(Steps("a\xC2\x80\xE0\xA0\x80\xF0\x90\x80\x80"), "C1C2C3C4");
  EXPECT_EQ(NextUtf8("\xF0\x9F\x99\x82", 0).code_point, U'\U0001F642');
  EXPECT_EQ(NextUtf8("\xF4\x8F\xBF\xBF", 0).code_point, char32_t{0x10FFFF});
}

TEST(Utf8Test, CutsInvalidBytesIntoMaximalSubparts) {
  // Chapter 3.9, table 3-8 to 3-11.
  EXPECT_EQ(Steps("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"), "I1I1I1I1I1I1I1I1C1");
  EXPECT_EQ(Steps("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41"), "I1I1I1I1I1I1I1I1C1");
  EXPECT_EQ(Steps("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42"), "I1I1I1I1I1C1I1I1C1");
  EXPECT_EQ(Steps("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "I2I1I3I2C1");
}

TEST(Utf8Test, TellsAPrefixFromAnInvalidSequence) {
  EXPECT_EQ(Steps("\xE2\x82"), "P2");
  EXPECT_EQ(Steps("\xE2\x28"), "I1C1");
  EXPECT_EQ(Steps("\xF0\x9F\x99"), "P3");
}

TEST(Utf8Test, FindsTheFirstInvalidByte) {
  EXPECT_EQ(FirstInvalidUtf8("na\xC3\xAFve"), std::nullopt);
  EXPECT_EQ(FirstInvalidUtf8(""), std::nullopt);
  EXPECT_EQ(FirstInvalidUtf8("ab\xC3("), 2u);
  EXPECT_EQ(FirstInvalidUtf8("ab\xE2\x82"), 2u);
  const absl::Status status = CheckUtf8("text", "ab\xFF");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "text: byte 0xff at offset 2 of 3 is not valid UTF-8");
}

TEST(Utf8Test, WritesWhatItReads) {
  for (const char32_t c : {0x41u, 0x7FFu, 0xFFFDu, 0x10000u, 0x10FFFFu}) {
    std::string bytes;
    AppendUtf8(c, &bytes);
    const Utf8Step step = NextUtf8(bytes, 0);
    EXPECT_EQ(step.code_point, c);
    EXPECT_EQ(step.size, bytes.size());
  }
}

}  // namespace
}  // namespace isthmus::text
