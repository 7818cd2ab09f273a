// SPDX-License-Identifier: Apache-2.0
// Every expected text was printed by CPython 3.11's json.dumps(json.loads(text),
// ensure_ascii=False).
#include "services/text/chat_json.h"

#include <gtest/gtest.h>

#include <limits>

namespace isthmus::text {
namespace {

std::string RoundTrip(absl::string_view text) {
  const auto parsed = ParseChatJson("test", text);
  return parsed.ok() ? PythonJson(*parsed) : std::string(parsed.status().message());
}

TEST(ChatJsonTest, PrintsFloatsAsPython) {
  EXPECT_EQ(RoundTrip("[0.1, 1e-7, 1e22, 3, 3.0, -0.0, -0, 1E5, 100]"),
            "[0.1, 1e-07, 1e+22, 3, 3.0, -0.0, 0, 100000.0, 100]");
  EXPECT_EQ(RoundTrip("[1e15, 1e16, 123456789012345680.0, 9007199254740993.0]"),
            "[1000000000000000.0, 1e+16, 1.2345678901234568e+17, 9007199254740992.0]");
  EXPECT_EQ(RoundTrip("[0.0001, 0.00001, 0.00012345, 1.5e-5, 2.5e-310, 5e-324]"),
            "[0.0001, 1e-05, 0.00012345, 1.5e-05, 2.5e-310, 5e-324]");
  EXPECT_EQ(RoundTrip("[1.7976931348623157e308, -1e100, 1e-100, 0.30000000000000004, 12.5]"),
            "[1.7976931348623157e+308, -1e+100, 1e-100, 0.30000000000000004, 12.5]");
  EXPECT_EQ(PythonJson(std::numeric_limits<double>::infinity()), "Infinity");
}

TEST(ChatJsonTest, KeepsEveryDigitOfIntegers) {
  EXPECT_EQ(RoundTrip("[18446744073709551615, -9223372036854775808]"),
            "[18446744073709551615, -9223372036854775808]");
  EXPECT_EQ(RoundTrip("[18446744073709551616, -123456789012345678901234567890]"),
            "[18446744073709551616, -123456789012345678901234567890]");
}

TEST(ChatJsonTest, KeepsTheOrderOfKeysAndTheLastOfEqualOnes) {
  EXPECT_EQ(RoundTrip(R"({"z":1,"a":{"y":[],"b":{}},"z":2})"),
            R"({"z": 2, "a": {"y": [], "b": {}}})");
}

TEST(ChatJsonTest, EscapesAsPython) {
  EXPECT_EQ(RoundTrip(R"(["\u0000\u001f\u007f\b\f\n\r\t\"\\\/é\u2028🙂"])"),
            "[\"\\u0000\\u001f\x7f\\b\\f\\n\\r\\t\\\"\\\\/é\xE2\x80\xA8🙂\"]");
  EXPECT_EQ(RoundTrip(R"([true, false, null, "\ud83d\ude42"])"), "[true, false, null, \"🙂\"]");
}

TEST(ChatJsonTest, RefusesWhatIsNotJson) {
  for (const absl::string_view text : {"", "{", "[1,]", "nul", "\"\\ud800\"", "\"\xFF\"", "1 2",
                                       "\xEF\xBB\xBF{}", "[1e999]", "NaN"}) {
    const auto parsed = ParseChatJson("body", text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(parsed.status().message().substr(0, 5), "body:");
    EXPECT_FALSE(IsJson(text));
  }
}

TEST(ChatJsonTest, ErrorsSayWhereAndDoNotQuoteTheConversation) {
  for (const absl::string_view text :
       {"{\"a\": \"secret \xFF\"}", "{\"a\": \"secret", "{\"a\": secret}", "[\"secret\\ud800\"]"}) {
    const std::string message(ParseChatJson("body", text).status().message());
    EXPECT_EQ(message.substr(0, 11), "body: byte ") << message;
    EXPECT_EQ(message.find("secret"), std::string::npos) << message;
  }
}

TEST(ChatJsonTest, DoesNotTakeNulForTheEnd) {
  EXPECT_EQ(ParseChatJson("t", absl::string_view("[1]\0x", 5)).status().message(),
            "t: NUL at byte 3 of 5");
}

TEST(ChatJsonTest, BoundsDepthAndWidth) {
  EXPECT_TRUE(ParseChatJson("t", std::string(512, '[') + std::string(512, ']')).ok());
  const auto deep = ParseChatJson("t", std::string(100000, '['));
  EXPECT_EQ(deep.status().message(), "t: nested deeper than 512 levels");
  std::string wide = "{";
  for (int i = 0; i < 5000; ++i) wide += (i ? ",\"" : "\"") + std::to_string(i) + "\":0";
  EXPECT_EQ(ParseChatJson("t", wide + "}").status().message(),
            "t: object has more than 4096 members");
  EXPECT_FALSE(ParseChatJson("t", std::string(5000, '9')).ok());
}

}  // namespace
}  // namespace isthmus::text
