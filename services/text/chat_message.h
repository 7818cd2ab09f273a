// SPDX-License-Identifier: Apache-2.0
// One message of a chat after its JSON has been checked; what chat_encoder.cc renders.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/text/tool_call_syntax.h"

namespace isthmus::text {

enum class Role : uint8_t { kSystem, kUser, kAssistant, kTool, kLatestReminder, kDeveloper };

// A part of a user message: text, or the result of a tool call.
struct ContentBlock {
  bool is_tool_result = false;
  std::string text;
  std::string tool_call_id;
};

struct ChatMessage {
  Role role = Role::kUser;
  std::string content;               // Not for user and tool.
  std::vector<ContentBlock> blocks;  // Of user and tool; at least one.
  std::string reasoning;
  std::vector<ToolCall> tool_calls;
  std::vector<std::string> tool_call_ids;  // As long as tool_calls; "" where there is none.
  std::string tool_schemas;                // One JSON schema per line; empty: no tools.
  std::string response_format;             // JSON; empty: none.
  std::string task;                        // Empty: none.
  bool ends_open = false;                  // `wo_eos`: no EOS after an assistant message.
};

// Errors: InvalidArgument; messages start with `field` (for instance "messages[2]").
absl::StatusOr<ChatMessage> ReadChatMessage(const std::string& field,
                                            const nlohmann::ordered_json& message);

}  // namespace isthmus::text
