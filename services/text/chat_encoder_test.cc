// SPDX-License-Identifier: Apache-2.0
// Prompts byte for byte: the vectors of the official encoder, and its rules by hand.
#include "services/text/chat_encoder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/text/chat_json.h"
#include "services/text/chat_request.h"
#include "services/text/encoder_text.h"
#include "services/text/testing_files.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;
using ::testing::HasSubstr;

ordered_json Json(absl::string_view text) { return *ParseChatJson("test", text); }

std::string Encode(absl::string_view messages, const ChatOptions& options = {}) {
  const auto prompt = EncodeChat(Json(messages), options);
  return prompt.ok() ? *prompt : std::string(prompt.status().ToString());
}

TEST(ChatEncoderTest, EqualsTheOfficialEncoderOnAllCases) {
  const auto file = BundledFile("encoding/cases.json", "encoding/cases.json");
  if (!file.has_value()) {
    if (IsCi()) FAIL() << "cases.json is neither bundled nor in ISTHMUS_GOLDEN_DIR";
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";
  }
  const ordered_json cases = Json(*file);
  ASSERT_EQ(cases.size(), 26u);
  for (const ordered_json& item : cases) {
    ChatOptions options;
    options.thinking = item.at("thinking_mode") == "thinking";
    options.drop_thinking = item.value("drop_thinking", true);
    options.reasoning_effort = item.value("reasoning_effort", "");
    const auto prompt = EncodeChat(item.at("messages"), options);
    ASSERT_TRUE(prompt.ok()) << item.at("id") << prompt.status();
    EXPECT_EQ(*prompt, item.at("prompt").get<std::string>()) << item.at("id");
  }
}

TEST(ChatEncoderTest, EqualsTheGoldenFilesOfTheRelease) {
  if (!GoldenFile("encoding/official/test_input_1.json").has_value()) {
    if (IsCi()) FAIL() << "ISTHMUS_GOLDEN_DIR is not set or lacks encoding/official";
    GTEST_SKIP() << "ISTHMUS_GOLDEN_DIR is not set";
  }
  for (const int n : {1, 2, 4}) {
    const std::string dir = "encoding/official/test_";
    ordered_json input = Json(*GoldenFile(dir + "input_" + std::to_string(n) + ".json"));
    if (input.is_array()) input = ordered_json{{"messages", input}};
    const auto messages = MessagesFromOpenAi(input);
    ASSERT_TRUE(messages.ok()) << messages.status();
    ChatOptions options;
    options.thinking = n != 4;
    const auto prompt = EncodeChat(*messages, options);
    ASSERT_TRUE(prompt.ok()) << prompt.status();
    EXPECT_EQ(*prompt, *GoldenFile(dir + "output_" + std::to_string(n) + ".txt")) << n;
  }
}

TEST(ChatEncoderTest, OrdersResultsByTheirCalls) {
  EXPECT_THAT(Encode(R"([{"role":"user","content":"q"},
      {"role":"assistant","tool_calls":[
        {"id":"a","function":{"name":"f","arguments":"{}"}},
        {"id":"b","function":{"name":"g","arguments":"{\"x\":null}"}}]},
      {"role":"tool","tool_call_id":"b","content":"second"},
      {"role":"user","content":"between"},
      {"role":"tool","tool_call_id":"a","content":"first"}])"),
              HasSubstr("<｜User｜><tool_result>first</tool_result>\n\nbetween\n\n"
                        "<tool_result>second</tool_result><｜Assistant｜></think>"));
}

TEST(ChatEncoderTest, DropsDeveloperMessagesOfEarlierTurns) {
  constexpr absl::string_view kMessages = R"([{"role":"developer","content":"d"},
      {"role":"assistant","content":"a","reasoning_content":"r"},
      {"role":"user","content":"u"}])";
  ChatOptions options;
  options.thinking = true;
  EXPECT_EQ(Encode(kMessages, options),
            "<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>");
  options.drop_thinking = false;
  EXPECT_EQ(Encode(kMessages, options),
            "<｜begin▁of▁sentence｜><｜User｜>d<｜Assistant｜><think>r</think>a"
            "<｜end▁of▁sentence｜><｜User｜>u<｜Assistant｜><think>");
}

TEST(ChatEncoderTest, WritesTasksAndOpenEnds) {
  EXPECT_EQ(Encode(R"([{"role":"user","content":"u","task":"title"},
                       {"role":"assistant","content":"t","wo_eos":true}])"),
            "<｜begin▁of▁sentence｜><｜User｜>u<｜title｜>t");
  EXPECT_EQ(Encode(R"([{"role":"user","content":"u","task":"query"},
                       {"role":"user","content":"v"}])"),
            "<｜begin▁of▁sentence｜><｜User｜>u<｜User｜>v<｜Assistant｜></think>");
  ChatOptions options;
  options.add_generation = false;
  EXPECT_EQ(Encode(R"([{"role":"user","content":"u"}])", options),
            "<｜begin▁of▁sentence｜><｜User｜>u");
}

TEST(ChatEncoderTest, RendersContentListsAndOddArguments) {
  EXPECT_EQ(Encode(R"([{"role":"user","content":[{"type":"text","text":"a"},
                       {"type":"image_url","image_url":{}},{"type":"text","text":"b"}]}])"),
            "<｜begin▁of▁sentence｜><｜User｜>a\n\n[Unsupported image_url]\n\nb"
            "<｜Assistant｜></think>");
  EXPECT_THAT(Encode(R"([{"role":"assistant","tool_calls":[{"function":{"name":"f",
                "arguments":"{\"a\":1.50,\"b\":[1e3,\"ü\"],\"c\":\"<x>\",)"
                     R"(\"d\":18446744073709551616}"}}]}])"),
              HasSubstr("name=\"a\" string=\"false\">1.5</｜DSML｜parameter>\n"
                        "<｜DSML｜parameter name=\"b\" string=\"false\">[1000.0, \"ü\"]"
                        "</｜DSML｜parameter>\n"
                        "<｜DSML｜parameter name=\"c\" string=\"true\"><x></｜DSML｜parameter>\n"
                        "<｜DSML｜parameter name=\"d\" string=\"false\">18446744073709551616<"));
  for (const char* arguments : {"[1]", "5", "", "{\\\"a\\\""}) {
    EXPECT_THAT(Encode(absl::StrCat(R"([{"role":"assistant","tool_calls":[{"function":{)",
                                    R"("name":"f","arguments":")", arguments, R"("}}]}])")),
                HasSubstr("<｜DSML｜parameter name=\"arguments\" string=\"true\">"));
  }
}

TEST(ChatEncoderTest, KnowsTheEffortLevelsOfBothGenerations) {
  constexpr absl::string_view kHi = R"([{"role":"user","content":"Hi"}])";
  const std::string bos(kBos);
  const std::string hi = "<｜User｜>Hi<｜Assistant｜><think>";
  ChatOptions options;
  options.thinking = true;
  const auto with = [&](const std::string& effort) {
    options.reasoning_effort = effort;
    return Encode(kHi, options);
  };
  for (const char* plain : {"", "none", "high"}) EXPECT_EQ(with(plain), bos + hi);
  EXPECT_EQ(with("max"), bos + std::string(kMaxEffortApril) + hi);
  EXPECT_EQ(with("xhigh"), with("max"));
  EXPECT_THAT(with("low"), HasSubstr("INVALID_ARGUMENT: reasoning_effort 'low' is unknown to the "
                                     "april encoder; expected none, high or max"));
  options.encoder.generation = EncoderGeneration::k0731;
  for (const char* plain : {"", "none", "low"}) EXPECT_EQ(with(plain), bos + hi);
  EXPECT_EQ(with("high"), bos + std::string(kMaxEffortApril) + hi);
  EXPECT_THAT(with("max"), HasSubstr("FAILED_PRECONDITION: reasoning_effort 'max' of the 0731"));
  EXPECT_THAT(with("medium"), HasSubstr("expected none, low, high or max"));
  options.encoder.max_effort_prefix = "ALL\n\n";
  EXPECT_EQ(with("max"), bos + "ALL\n\n" + hi);
  options.thinking = false;
  options.encoder.max_effort_prefix.reset();
  EXPECT_EQ(with("max"), bos + "<｜User｜>Hi<｜Assistant｜></think>");
}

TEST(ChatEncoderTest, NamesWhatIsWrong) {
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"{}", "messages must be a list, is object"},
      {"[]", "messages is empty"},
      {"[1]", "messages[0] must be an object, is number"},
      {R"([{"content":"x"}])", "messages[0].role is missing or empty"},
      {R"([{"role":"bot","content":"x"}])", "messages[0].role 'bot' is unknown"},
      {R"([{"role":"user"}])", "messages[0].content is missing"},
      {R"([{"role":"user","content":null}])", "messages[0].content is missing"},
      {R"([{"role":"tool"}])", "messages[0].content is missing"},
      {R"([{"role":"assistant"}])", "messages[0].content is missing"},
      {R"([{"role":"user","content":5}])", "messages[0].content must be a string or a list"},
      {R"([{"role":"system","content":[]}])", "messages[0].content must be a string, is array"},
      {R"([{"role":"user","content":[]}])", "messages[0].content is an empty list"},
      {R"([{"role":"user","content":[{"type":"text"}]}])",
       "messages[0].content[0].text is missing"},
      {R"([{"role":"user","content":"x","task":"nap"}])", "messages[0].task 'nap' is unknown"},
      {R"([{"role":"user","content":"x","tools":[{"function":{"name":"f"}}]}])",
       "messages[0].tools stands on a message"},
      {R"([{"role":"system","tools":[{"type":"web"}]}])", "messages[0].tools[0].type is 'web'"},
      {R"([{"role":"system","tools":[{"function":{}}]}])", "tools[0].function.name is missing"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"arguments":"{}"}}]}])",
       "messages[0].tool_calls[0].function.name is missing or empty"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f"}}]}])",
       "messages[0].tool_calls[0].function.arguments is missing"},
      {R"([{"role":"assistant","tool_calls":[{"id":7,"function":{"name":"f","arguments":""}}]}])",
       "messages[0].tool_calls[0].id must be a string, is number"},
      {R"([{"role":"assistant","content":"x","wo_eos":1}])", "wo_eos must be a boolean"},
      {R"([{"role":"system","content":"x","response_format":"json"}])",
       "messages[0].response_format must be an object"},
  };
  for (const auto& [messages, message] : cases) {
    const auto status = EncodeChat(Json(messages), {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << messages;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
  const ordered_json broken = {{{"role", "user"}, {"content", "a\xFF"}}};
  EXPECT_EQ(EncodeChat(broken, {}).status().message(),
            "messages[0].content: byte 0xff at offset 1 of 2 is not valid UTF-8");
}

}  // namespace
}  // namespace isthmus::text
