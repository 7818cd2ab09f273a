// SPDX-License-Identifier: Apache-2.0
// Checks the JSON of a message, member by member.
#include "services/text/chat_message.h"

#include <array>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "services/base/status_macros.h"
#include "services/text/chat_json.h"
#include "services/text/utf8.h"

namespace isthmus::text {
namespace {

using nlohmann::ordered_json;

constexpr std::array<absl::string_view, 6> kRoleNames = {
    "system", "user", "assistant", "tool", "latest_reminder", "developer"};
constexpr std::array<absl::string_view, 6> kTasks = {"action", "query", "authority",
                                                     "domain", "title", "read_url"};

absl::Status WrongType(absl::string_view field, absl::string_view wanted,
                       const ordered_json& value) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " must be ", wanted, ", is ", value.type_name()));
}

// A member; null counts as absent, as in the OpenAI API.
const ordered_json* Find(const ordered_json& object, const char* name) {
  const auto member = object.find(name);
  return member == object.end() || member->is_null() ? nullptr : &*member;
}

absl::StatusOr<std::string> ReadString(const std::string& field, const ordered_json& value) {
  if (!value.is_string()) return WrongType(field, "a string", value);
  const auto& text = value.get_ref<const std::string&>();
  ISTHMUS_RETURN_IF_ERROR(CheckUtf8(field, text));
  return text;
}

absl::StatusOr<std::string> OptionalString(const std::string& field, const ordered_json& object,
                                           const char* name) {
  const ordered_json* const value = Find(object, name);
  if (value == nullptr) return std::string();
  return ReadString(absl::StrCat(field, ".", name), *value);
}

absl::StatusOr<std::string> NonEmptyString(const std::string& field, const ordered_json& object,
                                           const char* name) {
  ISTHMUS_ASSIGN_OR_RETURN(std::string text, OptionalString(field, object, name));
  if (text.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(field, ".", name, " is missing or empty"));
  }
  return text;
}

absl::StatusOr<Role> ReadRole(const std::string& field, const ordered_json& message) {
  ISTHMUS_ASSIGN_OR_RETURN(const std::string name, NonEmptyString(field, message, "role"));
  for (size_t i = 0; i < kRoleNames.size(); ++i) {
    if (name == kRoleNames[i]) return static_cast<Role>(i);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      field, ".role '", name,
      "' is unknown; expected system, user, assistant, tool, latest_reminder or developer"));
}

// The text of one part of a content list. Parts that are not text become a note.
absl::StatusOr<std::string> ReadPart(const std::string& field, const ordered_json& part) {
  if (!part.is_object()) return WrongType(field, "an object", part);
  ISTHMUS_ASSIGN_OR_RETURN(const std::string type, NonEmptyString(field, part, "type"));
  if (type != "text") return absl::StrCat("[Unsupported ", type, "]");
  const ordered_json* const text = Find(part, "text");
  if (text == nullptr) return absl::InvalidArgumentError(absl::StrCat(field, ".text is missing"));
  return ReadString(absl::StrCat(field, ".text"), *text);
}

absl::StatusOr<std::vector<std::string>> ReadParts(const std::string& field,
                                                   const ordered_json& content) {
  if (!content.is_array()) return WrongType(field, "a string or a list of parts", content);
  std::vector<std::string> parts;
  for (size_t i = 0; i < content.size(); ++i) {
    ISTHMUS_ASSIGN_OR_RETURN(std::string text,
                             ReadPart(absl::StrCat(field, "[", i, "]"), content[i]));
    parts.push_back(std::move(text));
  }
  if (parts.empty()) return absl::InvalidArgumentError(absl::StrCat(field, " is an empty list"));
  return parts;
}

absl::Status ReadUserContent(const std::string& field, const ordered_json& content,
                             ChatMessage* out) {
  std::vector<std::string> texts;
  if (content.is_string()) {
    ISTHMUS_ASSIGN_OR_RETURN(std::string text, ReadString(field, content));
    texts.push_back(std::move(text));
  } else {
    ISTHMUS_ASSIGN_OR_RETURN(texts, ReadParts(field, content));
  }
  for (std::string& text : texts) out->blocks.push_back({false, std::move(text), ""});
  return absl::OkStatus();
}

absl::Status ReadToolContent(const std::string& field, const ordered_json& content,
                             const ordered_json& message, ChatMessage* out) {
  ContentBlock block;
  block.is_tool_result = true;
  if (content.is_string()) {
    ISTHMUS_ASSIGN_OR_RETURN(block.text, ReadString(field, content));
  } else {
    ISTHMUS_ASSIGN_OR_RETURN(const std::vector<std::string> parts, ReadParts(field, content));
    for (size_t i = 0; i < parts.size(); ++i) {
      absl::StrAppend(&block.text, i == 0 ? "" : "\n\n", parts[i]);
    }
  }
  ISTHMUS_ASSIGN_OR_RETURN(block.tool_call_id, OptionalString(field, message, "tool_call_id"));
  out->blocks.push_back(std::move(block));
  return absl::OkStatus();
}

absl::Status ReadContent(const std::string& message_field, const ordered_json& message,
                         ChatMessage* out) {
  const std::string field = absl::StrCat(message_field, ".content");
  const ordered_json* const content = Find(message, "content");
  if (content == nullptr) {
    const bool may_lack =
        (out->role == Role::kSystem &&
         !(out->tool_schemas.empty() && out->response_format.empty())) ||
        (out->role == Role::kAssistant && !(out->tool_calls.empty() && out->reasoning.empty()));
    if (may_lack) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(field, " is missing"));
  }
  if (out->role == Role::kUser) return ReadUserContent(field, *content, out);
  if (out->role == Role::kTool) return ReadToolContent(field, *content, message, out);
  ISTHMUS_ASSIGN_OR_RETURN(out->content, ReadString(field, *content));
  if (out->role == Role::kDeveloper && out->content.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is empty"));
  }
  return absl::OkStatus();
}

absl::Status ReadToolCalls(const std::string& message_field, const ordered_json& message,
                           ChatMessage* out) {
  const ordered_json* const calls = Find(message, "tool_calls");
  if (calls == nullptr) return absl::OkStatus();
  const std::string list = absl::StrCat(message_field, ".tool_calls");
  if (!calls->is_array()) return WrongType(list, "a list", *calls);
  for (size_t i = 0; i < calls->size(); ++i) {
    const std::string field = absl::StrCat(list, "[", i, "]");
    const ordered_json& call = (*calls)[i];
    if (!call.is_object()) return WrongType(field, "an object", call);
    const ordered_json* const function = Find(call, "function");
    const std::string path = absl::StrCat(field, ".function");
    if (function == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, " is missing"));
    if (!function->is_object()) return WrongType(path, "an object", *function);
    ToolCall read;
    ISTHMUS_ASSIGN_OR_RETURN(read.name, NonEmptyString(path, *function, "name"));
    const ordered_json* const arguments = Find(*function, "arguments");
    if (arguments == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(path, ".arguments is missing"));
    }
    ISTHMUS_ASSIGN_OR_RETURN(read.arguments,
                             ReadString(absl::StrCat(path, ".arguments"), *arguments));
    ISTHMUS_ASSIGN_OR_RETURN(std::string id, OptionalString(field, call, "id"));
    out->tool_calls.push_back(std::move(read));
    out->tool_call_ids.push_back(std::move(id));
  }
  return absl::OkStatus();
}

absl::Status ReadTools(const std::string& message_field, const ordered_json& message,
                       ChatMessage* out) {
  const ordered_json* const tools = Find(message, "tools");
  if (tools == nullptr) return absl::OkStatus();
  const std::string list = absl::StrCat(message_field, ".tools");
  if (!tools->is_array()) return WrongType(list, "a list", *tools);
  if (!tools->empty() && out->role != Role::kSystem && out->role != Role::kDeveloper) {
    return absl::InvalidArgumentError(
        absl::StrCat(list, " stands on a message that is neither system nor developer"));
  }
  for (size_t i = 0; i < tools->size(); ++i) {
    const std::string field = absl::StrCat(list, "[", i, "]");
    const ordered_json& tool = (*tools)[i];
    if (!tool.is_object()) return WrongType(field, "an object", tool);
    ISTHMUS_ASSIGN_OR_RETURN(const std::string type, OptionalString(field, tool, "type"));
    if (!type.empty() && type != "function") {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ".type is '", type, "', expected 'function'"));
    }
    const ordered_json* const function = Find(tool, "function");
    const std::string path = absl::StrCat(field, ".function");
    if (function == nullptr) return absl::InvalidArgumentError(absl::StrCat(path, " is missing"));
    if (!function->is_object()) return WrongType(path, "an object", *function);
    ISTHMUS_RETURN_IF_ERROR(NonEmptyString(path, *function, "name").status());
    absl::StrAppend(&out->tool_schemas, i == 0 ? "" : "\n", PythonJson(*function));
  }
  return CheckUtf8(list, out->tool_schemas);
}

absl::Status ReadResponseFormat(const std::string& message_field, const ordered_json& message,
                                ChatMessage* out) {
  const ordered_json* const format = Find(message, "response_format");
  if (format == nullptr) return absl::OkStatus();
  const std::string field = absl::StrCat(message_field, ".response_format");
  if (!format->is_object()) return WrongType(field, "an object", *format);
  if (format->empty()) return absl::OkStatus();
  out->response_format = PythonJson(*format);
  return CheckUtf8(field, out->response_format);
}

absl::Status ReadTask(const std::string& field, const ordered_json& message, ChatMessage* out) {
  ISTHMUS_ASSIGN_OR_RETURN(out->task, OptionalString(field, message, "task"));
  bool known = Find(message, "task") == nullptr;
  for (const absl::string_view task : kTasks) known = known || out->task == task;
  if (known) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ".task '", out->task,
                   "' is unknown; expected action, query, authority, domain, title or read_url"));
}

}  // namespace

absl::StatusOr<ChatMessage> ReadChatMessage(const std::string& field, const ordered_json& message) {
  if (!message.is_object()) return WrongType(field, "an object", message);
  ChatMessage out;
  ISTHMUS_ASSIGN_OR_RETURN(out.role, ReadRole(field, message));
  ISTHMUS_ASSIGN_OR_RETURN(out.reasoning, OptionalString(field, message, "reasoning_content"));
  ISTHMUS_RETURN_IF_ERROR(ReadToolCalls(field, message, &out));
  ISTHMUS_RETURN_IF_ERROR(ReadTools(field, message, &out));
  ISTHMUS_RETURN_IF_ERROR(ReadResponseFormat(field, message, &out));
  ISTHMUS_RETURN_IF_ERROR(ReadTask(field, message, &out));
  if (const ordered_json* const open = Find(message, "wo_eos"); open != nullptr) {
    if (!open->is_boolean()) return WrongType(absl::StrCat(field, ".wo_eos"), "a boolean", *open);
    out.ends_open = open->get<bool>();
  }
  ISTHMUS_RETURN_IF_ERROR(ReadContent(field, message, &out));
  return out;
}

}  // namespace isthmus::text
