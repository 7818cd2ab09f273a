// SPDX-License-Identifier: Apache-2.0
// Messages of a chat to the exact prompt text that the model was trained on (spec 7.2 to 7.5).
// The official encoder is a Python program; this one gives the same bytes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "services/text/encoder_profile.h"

namespace isthmus::text {

struct ChatOptions {
  bool thinking = false;      // The reply starts with reasoning.
  bool drop_thinking = true;  // Leave out reasoning of earlier turns; ignored with tools.
  // "" or "none", "low" (0731), "high", "max" (also "xhigh"). Has no effect unless `thinking`.
  std::string reasoning_effort;
  EncoderProfile encoder;
  // Ends the prompt with what makes the model reply, after a last user message or task.
  bool add_generation = true;
};

// `messages` is a list in the official encoder's form: `role` is system, user, assistant, tool,
// latest_reminder or developer; `content` is text, or for user and tool a list of parts; `tools`
// (OpenAI form) and `response_format` (a schema) stand on a system message; `task`, `wo_eos`,
// `reasoning_content`, `tool_calls`, `tool_call_id` as there. `mask` and `content_blocks` have no
// effect there and none here; other members are passed over too.
// Errors: InvalidArgument, naming the message and member: a wrong type, an unknown role, missing
//         content, a call without a name, text that is not UTF-8, an unknown effort.
//         FailedPrecondition: effort "max" of 0731 without the checkpoint's own encoder file.
absl::StatusOr<std::string> EncodeChat(const nlohmann::ordered_json& messages,
                                       const ChatOptions& options);

}  // namespace isthmus::text
