// SPDX-License-Identifier: Apache-2.0
#include "services/diag/recall.h"

#include <fstream>
#include <sstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "services/base/status_macros.h"
#include "services/text/chat_json.h"

namespace isthmus::diag {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kReplyTokens = 256;

void Ignore(absl::string_view) {}

// Turns of a user in order; the replies in between are the model's own.
absl::StatusOr<CaseResult> RunTurns(const ChatBackend& chat, const ordered_json& test_case) {
  CaseResult result;
  result.passed = true;
  ChatRequest request;
  request.sampling.max_tokens = kReplyTokens;
  request.body["messages"] = ordered_json::array();
  for (const ordered_json& turn : test_case["turns"]) {
    if (!turn.contains("user") || !turn["user"].is_string()) {
      return absl::InvalidArgumentError("a turn has no text \"user\"");
    }
    request.body["messages"].push_back({{"role", "user"}, {"content", turn["user"]}});
    ISTHMUS_ASSIGN_OR_RETURN(const ChatReply reply, chat(request, Ignore));
    result.seconds += reply.seconds;
    result.tokens = reply.prompt_tokens;
    result.reply = reply.text;
    const bool expects = turn.contains("expect") && turn["expect"].is_string();
    if (expects &&
        reply.message.content.find(turn["expect"].get<std::string>()) == std::string::npos) {
      result.passed = false;
      return result;
    }
    request.body["messages"].push_back(HistoryMessage(reply));
  }
  return result;
}

bool CallsAreEqual(const ordered_json& expected, const std::vector<text::ToolCall>& calls) {
  if (expected.size() != calls.size()) return false;
  for (size_t i = 0; i < calls.size(); ++i) {
    // Key order is no part of the answer, so compare as sorted objects.
    const nlohmann::json got = nlohmann::json::parse(calls[i].arguments, nullptr, false);
    const nlohmann::json want = expected[i]["arguments"];
    if (ordered_json(calls[i].name) != expected[i]["name"] || got != want) return false;
  }
  return true;
}

// One completion whose message must be exact.
absl::StatusOr<CaseResult> RunCompletion(const ChatBackend& chat, const ordered_json& test_case) {
  ChatRequest request;
  request.sampling.max_tokens = kReplyTokens;
  request.body["messages"] = test_case["messages"];
  if (test_case.contains("tools")) request.body["tools"] = test_case["tools"];
  request.thinking = test_case.value("thinking", false);
  ISTHMUS_ASSIGN_OR_RETURN(const ChatReply reply, chat(request, Ignore));
  CaseResult result;
  result.seconds = reply.seconds;
  result.tokens = reply.prompt_tokens;
  result.reply = reply.text;
  const ordered_json& expect = test_case["expect"];
  if (expect.contains("tool_calls")) {
    result.passed = CallsAreEqual(expect["tool_calls"], reply.message.tool_calls);
  } else if (expect.contains("content")) {
    result.passed = reply.message.tool_calls.empty() &&
                    ordered_json(reply.message.content) == expect["content"];
  } else {
    return absl::InvalidArgumentError("\"expect\" has neither tool_calls nor content");
  }
  return result;
}

}  // namespace

absl::StatusOr<CaseResult> RunCase(const ChatBackend& chat, const ordered_json& test_case) {
  const bool is_object = test_case.is_object() && test_case.contains("id");
  if (!is_object || !test_case["id"].is_string()) {
    return absl::InvalidArgumentError("a case is no object with a text \"id\"");
  }
  const std::string id = test_case["id"];
  absl::StatusOr<CaseResult> result =
      absl::InvalidArgumentError("neither \"turns\" nor \"messages\" with \"expect\"");
  if (test_case.contains("turns")) {
    result = RunTurns(chat, test_case);
  } else if (test_case.contains("messages") && test_case.contains("expect")) {
    result = RunCompletion(chat, test_case);
  }
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat("case ", id, ": ", result.status().message()));
  }
  result->id = id;
  return result;
}

absl::StatusOr<ordered_json> ReadCases(const std::string& path) {
  std::ifstream file(path);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot read the cases ", path));
  std::stringstream text;
  text << file.rdbuf();
  ISTHMUS_ASSIGN_OR_RETURN(ordered_json cases, text::ParseChatJson(path, text.str()));
  if (!cases.is_array()) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected a list of cases"));
  }
  return cases;
}

ordered_json ResultsJson(const std::vector<CaseResult>& results) {
  ordered_json list = ordered_json::array();
  for (const CaseResult& result : results) {
    list.push_back({{"id", result.id},
                    {"passed", result.passed},
                    {"reply", result.reply},
                    {"tokens", result.tokens},
                    {"seconds", result.seconds}});
  }
  return list;
}

}  // namespace isthmus::diag
