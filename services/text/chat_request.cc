// SPDX-License-Identifier: Apache-2.0
// Moves what the OpenAI API keeps beside the messages to where the encoder looks for it.
#include "services/text/chat_request.h"

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "services/base/status_macros.h"
#include "services/text/chat_json.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;

absl::Status WrongType(absl::string_view field, absl::string_view wanted,
                       const ordered_json& value) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " must be ", wanted, ", is ", value.type_name()));
}

const ordered_json* Find(const ordered_json& object, const char* name) {
  const auto member = object.find(name);
  return member == object.end() || member->is_null() ? nullptr : &*member;
}

// Text parts to one text; the model reads nothing else outside user messages.
absl::Status JoinTextParts(const std::string& field, ordered_json* content) {
  std::string joined;
  for (size_t i = 0; i < content->size(); ++i) {
    const ordered_json& part = (*content)[i];
    const std::string path = absl::StrCat(field, "[", i, "]");
    if (!part.is_object()) return WrongType(path, "an object", part);
    const ordered_json* const type = Find(part, "type");
    if (type == nullptr || *type != "text") {
      return absl::InvalidArgumentError(absl::StrCat(path, ".type must be 'text'"));
    }
    const ordered_json* const text = Find(part, "text");
    if (text == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, ".text is missing"));
    if (!text->is_string()) return WrongType(absl::StrCat(path, ".text"), "a string", *text);
    absl::StrAppend(&joined, i == 0 ? "" : "\n\n", text->get_ref<const std::string&>());
  }
  *content = std::move(joined);
  return absl::OkStatus();
}

// Some clients keep the arguments of a call as an object.
void ArgumentsToText(ordered_json* message) {
  const auto calls = message->find("tool_calls");
  if (calls == message->end() || !calls->is_array()) return;
  for (ordered_json& call : *calls) {
    if (!call.is_object()) continue;
    const auto function = call.find("function");
    if (function == call.end() || !function->is_object()) continue;
    const auto arguments = function->find("arguments");
    if (arguments == function->end() || !arguments->is_object()) continue;
    *arguments = PythonJson(*arguments);
  }
}

absl::Status NormaliseMessage(const std::string& field, ordered_json* message) {
  if (!message->is_object()) return WrongType(field, "an object", *message);
  const ordered_json* const role = Find(*message, "role");
  if (role == nullptr) return absl::InvalidArgumentError(absl::StrCat(field, ".role is missing"));
  if (*role == "developer") {
    return absl::InvalidArgumentError(
        absl::StrCat(field, ".role 'developer' is internal to the model; use 'system'"));
  }
  const auto content = message->find("content");
  if (content != message->end() && content->is_array() &&
      (*role == "system" || *role == "assistant")) {
    ISTHMUS_RETURN_IF_ERROR(JoinTextParts(absl::StrCat(field, ".content"), &*content));
  }
  ArgumentsToText(message);
  return absl::OkStatus();
}

// The tools that the model may use, or nothing.
absl::StatusOr<const ordered_json*> UsableTools(const ordered_json& request) {
  const ordered_json* const tools = Find(request, "tools");
  if (tools != nullptr && !tools->is_array()) return WrongType("tools", "a list", *tools);
  const ordered_json* const choice = Find(request, "tool_choice");
  if (choice != nullptr && *choice == "none") return nullptr;
  if (choice != nullptr && *choice != "auto") {
    return absl::InvalidArgumentError(absl::StrCat("tool_choice ", PythonJson(*choice),
                                                   " is not supported; expected auto or none"));
  }
  return tools == nullptr || tools->empty() ? nullptr : tools;
}

// The schema to which the reply must adhere; null without one.
absl::StatusOr<ordered_json> SchemaOf(const ordered_json& request) {
  const ordered_json* const format = Find(request, "response_format");
  if (format == nullptr) return ordered_json();
  if (!format->is_object()) return WrongType("response_format", "an object", *format);
  const ordered_json* const type = Find(*format, "type");
  if (type != nullptr && *type == "text") return ordered_json();
  if (type != nullptr && *type == "json_object") return ordered_json{{"type", "object"}};
  if (type == nullptr || *type != "json_schema") {
    return absl::InvalidArgumentError(
        "response_format.type must be 'text', 'json_object' or 'json_schema'");
  }
  const ordered_json* const wrapper = Find(*format, "json_schema");
  const ordered_json* const schema =
      wrapper != nullptr && wrapper->is_object() ? Find(*wrapper, "schema") : nullptr;
  if (schema == nullptr || !schema->is_object()) {
    return absl::InvalidArgumentError("response_format.json_schema.schema must be an object");
  }
  return *schema;
}

// The first system message; an empty one is put in front where there is none.
ordered_json* FirstSystemMessage(ordered_json* messages) {
  for (ordered_json& message : *messages) {
    if (message["role"] == "system") return &message;
  }
  messages->insert(messages->begin(), ordered_json{{"role", "system"}, {"content", ""}});
  return &messages->front();
}

absl::Status PutOnSystemMessage(const char* name, ordered_json value, ordered_json* messages) {
  ordered_json* const system = FirstSystemMessage(messages);
  if (Find(*system, name) != nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is given both in the request and on its system message"));
  }
  (*system)[name] = std::move(value);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ordered_json> MessagesFromOpenAi(const ordered_json& request) {
  if (!request.is_object()) return WrongType("request", "an object", request);
  const ordered_json* const given = Find(request, "messages");
  if (given == nullptr) return absl::InvalidArgumentError("messages is missing");
  if (!given->is_array()) return WrongType("messages", "a list", *given);
  if (given->empty()) return absl::InvalidArgumentError("messages is empty");
  ordered_json messages = *given;
  for (size_t i = 0; i < messages.size(); ++i) {
    ISTHMUS_RETURN_IF_ERROR(NormaliseMessage(absl::StrCat("messages[", i, "]"), &messages[i]));
  }
  ISTHMUS_ASSIGN_OR_RETURN(const ordered_json* tools, UsableTools(request));
  if (const ordered_json* const choice = Find(request, "tool_choice");
      choice != nullptr && *choice == "none") {
    for (ordered_json& message : messages) message.erase("tools");
  }
  if (tools != nullptr) ISTHMUS_RETURN_IF_ERROR(PutOnSystemMessage("tools", *tools, &messages));
  ISTHMUS_ASSIGN_OR_RETURN(ordered_json schema, SchemaOf(request));
  if (!schema.is_null()) {
    ISTHMUS_RETURN_IF_ERROR(PutOnSystemMessage("response_format", std::move(schema), &messages));
  }
  return messages;
}

}  // namespace isthmus::text
