// SPDX-License-Identifier: Apache-2.0
// Replies, whole and in pieces.
#include "services/text/reply_parser.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

constexpr absl::string_view kCall =
    "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"save\">\n"
    "<｜DSML｜parameter name=\"path\" string=\"true\">a \"b\"\n<c></｜DSML｜parameter>\n"
    "<｜DSML｜parameter name=\"n\" string=\"false\">1.50</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n<｜DSML｜invoke name=\"stop\">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>";
constexpr absl::string_view kArguments = "{\"path\": \"a \\\"b\\\"\\n<c>\", \"n\": 1.50}";

// "reasoning|content|name(arguments)...": one line to compare.
std::string Shown(const ParsedReply& reply) {
  std::string out = reply.reasoning_content + "|" + reply.content + "|";
  for (const ToolCall& call : reply.tool_calls) out += call.name + "(" + call.arguments + ")";
  if (reply.has_incomplete_call) out += "|incomplete";
  if (reply.is_malformed) out += "|malformed";
  return out;
}

// Parses in pieces and checks that the deltas add up to the reply.
std::string InPieces(const std::vector<absl::string_view>& pieces, bool thinking) {
  ReplyParser parser(thinking);
  ParsedReply sum;
  const auto add = [&sum](const ReplyDelta& delta) {
    sum.reasoning_content += delta.reasoning;
    sum.content += delta.content;
    for (const ToolCall& call : delta.tool_calls) sum.tool_calls.push_back(call);
  };
  for (const absl::string_view piece : pieces) add(parser.Push(piece));
  add(parser.Finish());
  sum.has_incomplete_call = parser.reply().has_incomplete_call;
  sum.is_malformed = parser.reply().is_malformed;
  EXPECT_EQ(Shown(sum), Shown(parser.reply()));
  return Shown(sum);
}

struct Case {
  const char* what;
  bool thinking;
  std::string text;
  std::string shown;
};

std::vector<Case> Cases() {
  const std::string call(kCall);
  const std::string parsed = "save(" + std::string(kArguments) + ")stop({})";
  return {
      {"plain", false, "Hello <b>\n\n", "|Hello <b>\n\n|"},
      {"empty", true, "", "||"},
      {"reasoning", true, "hm\n</think>Yes.\n<｜end▁of▁sentence｜>junk", "hm\n|Yes.\n|"},
      {"empty reasoning", true, "</think>x", "|x|"},
      {"unfinished reasoning", true, "hm <", "hm <||"},
      {"calls", false, "Sure.\n\n" + call, "|Sure.|" + parsed},
      {"calls after reasoning", true, "r</think>\n\n" + call + "<｜end▁of▁sentence｜>",
       "r||" + parsed},
      {"three newlines before calls", false, "a\n\n\n" + call, "|a\n|" + parsed},
      {"missing end of reasoning", true, "I call.\n\n" + call, "I call.||" + parsed + "|malformed"},
      {"repeated begin of reasoning", true, "<think>r</think>c", "r|c||malformed"},
      {"repeated end of reasoning", false, "</think>c", "|c||malformed"},
      {"begin of reasoning in chat", false, "<think>r</think>c", "r|c||malformed"},
      {"end of reasoning inside content", false, "a</think>b", "|a</think>b|"},
      {"no outer block", false,
       "ok\n\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" string=\"true\">1"
       "</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>",
       "|ok|f({\"a\": \"1\"})g({})|malformed"},
      {"other block name", false,
       "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n"
       "</｜DSML｜function_calls>",
       "||f({})"},
      {"missing end of invoke", false,
       "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜invoke name=\"g\">\n"
       "</｜DSML｜tool_calls>",
       "||f({})g({})|malformed"},
      {"text after calls", false, call + "\n\nDone.", "|Done.|" + parsed + "|malformed"},
      {"two blocks", false, call + "\n\n" + call, "||" + parsed + parsed},
      {"values", false,
       "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
       "<｜DSML｜parameter name=\"a\" string=\"false\"> {\"z\": [1e5, 2.0]}\n</｜DSML｜parameter>\n"
       "<｜DSML｜parameter name=\"b\" "
       "string=\"false\">12345678901234567890123</｜DSML｜parameter>\n"
       "<｜DSML｜parameter name=\"a\" string=\"false\">null</｜DSML｜parameter>\n"
       "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
       "||f({\"a\": null, \"b\": 12345678901234567890123})"},
      {"value that is not JSON", false,
       "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
       "<｜DSML｜parameter name=\"a\" string=\"false\">a b</｜DSML｜parameter>\n"
       "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
       "||f({\"a\": \"a b\"})|malformed"},
      {"parameter without string", false,
       "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
       "<｜DSML｜parameter name=\"a\">5</｜DSML｜parameter>junk <\n</｜DSML｜invoke>\n",
       "||f({\"a\": \"5\"})|malformed"},
      {"markup inside a value", false,
       "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"a\" "
       "string=\"true\"></｜DSML｜invoke></think><｜DSML｜parameter name=\"</｜DSML｜parameter>\n"
       "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
       "||f({\"a\": \"</｜DSML｜invoke></think><｜DSML｜parameter name=\\\"\"})"},
      {"cut off inside a value", false, "x\n\n" + call.substr(0, 110), "|x||incomplete"},
      {"cut off inside a marker", false, "x\n\n<｜DSML｜tool_ca", "|x|"},
      {"cut off inside the end", true, "r</think>a<｜end▁of", "r|a|"},
      {"a bracket at the end", false, "a <", "|a <|"},
      {"DSML in prose", false, "The <｜DSML｜ prefix, <｜DSML｜tool_calls is",
       "|The <｜DSML｜ prefix, <｜DSML｜tool_calls is|"},
      {"not a call", false, "<｜DSML｜invoke name=\"a\nb\">",
       "|<｜DSML｜invoke name=\"a\nb\">||malformed"},
      {"unicode", true, "naïve 你好</think>🙂 \u202e", "naïve 你好|🙂 \u202e|"},
  };
}

TEST(ReplyParserTest, TakesRepliesApart) {
  for (const Case& c : Cases()) {
    EXPECT_EQ(Shown(ParseReply(c.text, c.thinking)), c.shown) << c.what;
  }
}

TEST(ReplyParserTest, GivesTheSameForEverySplit) {
  for (const Case& c : Cases()) {
    const absl::string_view text = c.text;
    for (size_t cut = 0; cut <= text.size(); ++cut) {
      ASSERT_EQ(InPieces({text.substr(0, cut), text.substr(cut)}, c.thinking), c.shown)
          << c.what << ", cut at " << cut;
    }
    for (size_t size = 1; size < 8; ++size) {
      std::vector<absl::string_view> pieces;
      for (size_t at = 0; at < text.size(); at += size) pieces.push_back(text.substr(at, size));
      ASSERT_EQ(InPieces(pieces, c.thinking), c.shown) << c.what << ", pieces of " << size;
    }
  }
}

TEST(ReplyParserTest, StreamsWhatIsCertain) {
  ReplyParser parser(true);
  EXPECT_EQ(parser.Push("Let me").reasoning, "Let me");
  EXPECT_TRUE(parser.Push("</thi").empty());
  EXPECT_EQ(parser.Push("nk>Hello").content, "Hello");
  EXPECT_EQ(parser.Push(" there\n\n").content, " there");
  EXPECT_TRUE(parser.Push("<").empty());
  EXPECT_EQ(parser.Push("b>").content, "\n\n<b>");
  EXPECT_TRUE(parser.Push("\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n").empty());
  const ReplyDelta delta = parser.Push("</｜DSML｜invoke>\n");
  ASSERT_EQ(delta.tool_calls.size(), 1u);
  EXPECT_EQ(delta.tool_calls[0].name, "f");
  EXPECT_TRUE(parser.Finish().empty());
  EXPECT_TRUE(parser.Push("more").empty());
}

TEST(ReplyParserTest, ReadsWhatTheEncoderWrites) {
  const std::vector<ToolCall> calls = {
      {"f", "{\"text\": \"line\\nline\", \"n\": [1, 2.5], \"ok\": true}"}, {"g", "{}"}};
  const ParsedReply reply = ParseReply("x\n\n" + RenderToolCalls(calls), false);
  ASSERT_EQ(reply.tool_calls.size(), 2u);
  EXPECT_EQ(reply.content, "x");
  EXPECT_FALSE(reply.is_malformed);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(reply.tool_calls[i].name, calls[i].name);
    EXPECT_EQ(reply.tool_calls[i].arguments, calls[i].arguments);
  }
}

TEST(ReplyParserTest, IsNotQuadraticInALongValue) {
  ReplyParser parser(false);
  parser.Push(
      "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n"
      "<｜DSML｜parameter name=\"a\" string=\"true\">");
  for (int i = 0; i < 200000; ++i) parser.Push("<abcdefg");
  parser.Push("</｜DSML｜parameter>\n</｜DSML｜invoke>");
  parser.Finish();
  ASSERT_EQ(parser.reply().tool_calls.size(), 1u);
  EXPECT_EQ(parser.reply().tool_calls[0].arguments.size(), 8u * 200000 + 9);
}

}  // namespace
}  // namespace isthmus::text
