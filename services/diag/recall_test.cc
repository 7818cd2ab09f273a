// SPDX-License-Identifier: Apache-2.0
#include "services/diag/recall.h"

#include <gtest/gtest.h>

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

// Replies with the given texts in order and remembers the requests.
class Script {
 public:
  explicit Script(std::vector<std::string> replies) : replies_(std::move(replies)) {}

  ChatBackend Backend() {
    return [this](const ChatRequest& request, const auto&) -> absl::StatusOr<ChatReply> {
      requests.push_back(request);
      ChatReply reply;
      reply.text = replies_.at(requests.size() - 1);
      reply.message = text::ParseReply(reply.text, request.thinking);
      return reply;
    };
  }

  std::vector<ChatRequest> requests;

 private:
  std::vector<std::string> replies_;
};

ordered_json Case(const char* text) { return ordered_json::parse(text); }

TEST(RecallTest, PutsTheModelsOwnRepliesBetweenTheTurns) {
  Script script({"noted", "it is amber falcon."});
  const auto result = RunCase(script.Backend(), Case(R"({"id": "a", "turns": [
      {"user": "remember"}, {"user": "which?", "expect": "amber falcon"}]})"));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(result->passed);
  const ordered_json& messages = script.requests[1].body["messages"];
  ASSERT_EQ(messages.size(), 3u);
  EXPECT_EQ(messages[1]["role"], "assistant");
  EXPECT_EQ(messages[1]["content"], "noted");
}

TEST(RecallTest, FailsAtTheFirstTurnWithoutItsText) {
  Script script({"I do not know that code."});
  const auto result = RunCase(script.Backend(), Case(R"({"id": "a", "turns": [
      {"user": "which?", "expect": "amber falcon"}, {"user": "never asked"}]})"));
  ASSERT_TRUE(result.ok());
  EXPECT_FALSE(result->passed);
  EXPECT_EQ(result->reply, "I do not know that code.");
  EXPECT_EQ(script.requests.size(), 1u);
}

constexpr char kCall[] =
    "\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"send\">\n"
    "<｜DSML｜parameter name=\"to\" string=\"true\">Anna</｜DSML｜parameter>\n"
    "<｜DSML｜parameter name=\"n\" string=\"false\">2</｜DSML｜parameter>\n"
    "</｜DSML｜invoke>\n</｜DSML｜tool_calls>";

TEST(RecallTest, ComparesCallsWithoutRegardToTheOrderOfArguments) {
  Script script({kCall});
  const auto result = RunCase(script.Backend(), Case(R"({"id": "a", "messages": [],
      "expect": {"tool_calls": [{"name": "send", "arguments": {"n": 2, "to": "Anna"}}]}})"));
  ASSERT_TRUE(result.ok());
  EXPECT_TRUE(result->passed);
}

TEST(RecallTest, AnotherValueOrTypeOfAnArgumentFails) {
  for (const char* arguments :
       {R"({"n": 3, "to": "Anna"})", R"({"n": "2", "to": "Anna"})", R"({"to": "Anna"})"}) {
    Script script({kCall});
    ordered_json test_case = Case(R"({"id": "a", "messages": [],
        "expect": {"tool_calls": [{"name": "send"}]}})");
    test_case["expect"]["tool_calls"][0]["arguments"] = Case(arguments);
    EXPECT_FALSE(RunCase(script.Backend(), test_case)->passed) << arguments;
  }
}

TEST(RecallTest, ContentMustBeExactAndWithoutCalls) {
  const ordered_json test_case =
      Case(R"({"id": "a", "messages": [], "expect": {"content": "Sent."}})");
  Script exact({"Sent."});
  EXPECT_TRUE(RunCase(exact.Backend(), test_case)->passed);
  Script longer({"Sent. Bye."});
  EXPECT_FALSE(RunCase(longer.Backend(), test_case)->passed);
  Script calls({std::string("Sent.") + kCall});
  EXPECT_FALSE(RunCase(calls.Backend(), test_case)->passed);
}

TEST(RecallTest, RefusesACaseOfNeitherFormByItsId) {
  Script script({});
  for (const char* text : {R"({"id": "odd"})", R"({"id": "odd", "messages": []})"}) {
    const auto result = RunCase(script.Backend(), Case(text));
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(result.status().message().find("odd"), absl::string_view::npos);
  }
  EXPECT_FALSE(RunCase(script.Backend(), Case("[]")).ok());
}

}  // namespace
}  // namespace isthmus::diag
