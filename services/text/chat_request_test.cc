// SPDX-License-Identifier: Apache-2.0
// Requests in OpenAI form.
#include "services/text/chat_request.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "services/text/chat_json.h"

namespace isthmus::text {
namespace {

using ::testing::HasSubstr;

std::string Messages(absl::string_view request) {
  const auto messages = MessagesFromOpenAi(*ParseChatJson("test", request));
  return messages.ok() ? PythonJson(*messages) : std::string(messages.status().message());
}

constexpr absl::string_view kTools = R"("tools":[{"type":"function","function":{"name":"f"}}])";

TEST(ChatRequestTest, PutsToolsOnTheFirstSystemMessage) {
  EXPECT_EQ(Messages(absl::StrCat(R"({"messages":[{"role":"user","content":"u"},
                         {"role":"system","content":"s"},{"role":"system","content":"t"}],)",
                                  kTools, "}")),
            R"([{"role": "user", "content": "u"}, {"role": "system", "content": "s", )"
            R"("tools": [{"type": "function", "function": {"name": "f"}}]}, )"
            R"({"role": "system", "content": "t"}])");
}

TEST(ChatRequestTest, MakesASystemMessageWhereThereIsNone) {
  EXPECT_EQ(Messages(absl::StrCat(R"({"messages":[{"role":"user","content":"u"}],)", kTools, "}")),
            R"([{"role": "system", "content": "", )"
            R"("tools": [{"type": "function", "function": {"name": "f"}}]}, )"
            R"({"role": "user", "content": "u"}])");
  EXPECT_EQ(Messages(R"({"messages":[{"role":"user","content":"u"}],"tools":[]})"),
            R"([{"role": "user", "content": "u"}])");
}

TEST(ChatRequestTest, LeavesToolsOutWhenTheyMayNotBeCalled) {
  EXPECT_EQ(Messages(absl::StrCat(R"({"messages":[{"role":"system","content":"","tools":[]}],)",
                                  kTools, R"(,"tool_choice":"none"})")),
            R"([{"role": "system", "content": ""}])");
  EXPECT_THAT(Messages(R"({"messages":[{"role":"user","content":"u"}],"tool_choice":"required"})"),
              HasSubstr("tool_choice \"required\" is not supported"));
}

TEST(ChatRequestTest, PlacesTheSchemaOfTheReply) {
  constexpr absl::string_view kUser = R"({"messages":[{"role":"user","content":"u"}],)";
  EXPECT_THAT(Messages(absl::StrCat(kUser, R"("response_format":{"type":"json_schema",
                "json_schema":{"name":"n","schema":{"type":"array"}}}})")),
              HasSubstr(R"("content": "", "response_format": {"type": "array"}})"));
  EXPECT_THAT(Messages(absl::StrCat(kUser, R"("response_format":{"type":"json_object"}})")),
              HasSubstr(R"("response_format": {"type": "object"}})"));
  EXPECT_EQ(Messages(absl::StrCat(kUser, R"("response_format":{"type":"text"}})")),
            R"([{"role": "user", "content": "u"}])");
  EXPECT_THAT(Messages(absl::StrCat(kUser, R"("response_format":{"type":"xml"}})")),
              HasSubstr("response_format.type must be"));
}

TEST(ChatRequestTest, TurnsOtherSpellingsIntoTheEncoders) {
  EXPECT_EQ(Messages(R"({"messages":[{"role":"system","content":[{"type":"text","text":"a"},
                         {"type":"text","text":"b"}]},{"role":"assistant","content":null,
                         "tool_calls":[{"function":{"name":"f","arguments":{"x":1.0}}}]}]})"),
            R"([{"role": "system", "content": "a\n\nb"}, {"role": "assistant", "content": null, )"
            R"("tool_calls": [{"function": {"name": "f", "arguments": "{\"x\": 1.0}"}}]}])");
}

TEST(ChatRequestTest, NamesWhatIsWrong) {
  EXPECT_EQ(Messages("[]"), "request must be an object, is array");
  EXPECT_EQ(Messages("{}"), "messages is missing");
  EXPECT_EQ(Messages(R"({"messages":{}})"), "messages must be a list, is object");
  EXPECT_EQ(Messages(R"({"messages":[]})"), "messages is empty");
  EXPECT_EQ(Messages(R"({"messages":[{}]})"), "messages[0].role is missing");
  EXPECT_EQ(Messages(R"({"messages":[{"role":"developer","content":"x"}]})"),
            "messages[0].role 'developer' is internal to the model; use 'system'");
  EXPECT_EQ(Messages(R"({"messages":[{"role":"system","content":[{"type":"image_url"}]}]})"),
            "messages[0].content[0].type must be 'text'");
  EXPECT_EQ(Messages(R"({"messages":[{"role":"user","content":"x"}],"tools":3})"),
            "tools must be a list, is number");
  EXPECT_EQ(Messages(absl::StrCat(R"({"messages":[{"role":"system","content":"",)", kTools, "}],",
                                  kTools, "}")),
            "tools is given both in the request and on its system message");
}

}  // namespace
}  // namespace isthmus::text
