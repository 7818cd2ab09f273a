// SPDX-License-Identifier: Apache-2.0
// From a chat request in OpenAI form to the messages of the official encoder (chat_encoder.h).
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"

namespace isthmus::text {

// `request`: {"messages": [...], "tools": [...], "tool_choice": ..., "response_format": ...}; other
// members are the caller's business. Returns the messages with
//  - `tools` on the first system message, or on an empty one put in front; left out when
//    `tool_choice` is "none" (spec 10.10);
//  - the schema of `response_format` (json_schema, or {"type": "object"} for json_object) there
//  too;
//  - lists of text parts of system and assistant messages joined by a blank line;
//  - arguments of earlier tool calls that are objects instead of text turned into text.
// Errors: InvalidArgument, naming the member. The role `developer` is refused: it is internal, and
//         the encoder deletes such messages. So is a `tool_choice` that would force a call.
absl::StatusOr<nlohmann::ordered_json> MessagesFromOpenAi(const nlohmann::ordered_json& request);

}  // namespace isthmus::text
