// SPDX-License-Identifier: Apache-2.0
// A tool call as the API knows it, and the DSML text that the model reads (spec 7.5).
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace isthmus::text {

struct ToolCall {
  std::string name;
  std::string arguments;  // JSON text, normally of an object, in the model's order of keys.
};

// The `tool_calls` block without the blank line before it. String arguments are written raw, all
// others as JSON. Arguments that are not a JSON object become one string parameter `arguments`.
// A value that contains the closing parameter tag cannot be told from the end of the value; the
// official encoder does not escape it either.
std::string RenderToolCalls(const std::vector<ToolCall>& calls);

}  // namespace isthmus::text
