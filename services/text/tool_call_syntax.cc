// SPDX-License-Identifier: Apache-2.0
// Writes DSML.
#include "services/text/tool_call_syntax.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "services/text/chat_json.h"
#include "services/text/encoder_text.h"

namespace isthmus::text {
namespace {

void AppendParameter(absl::string_view name, bool is_string, absl::string_view value,
                     std::string* out) {
  absl::StrAppend(out, kDsmlOpen, kParameter, " name=\"", name);
  absl::StrAppend(out, "\" string=\"", is_string ? "true" : "false", "\">", value);
  absl::StrAppend(out, kDsmlClose, kParameter, ">");
}

std::string RenderArguments(const std::string& arguments) {
  std::string out;
  const auto parsed = ParseChatJson("arguments", arguments);
  if (!parsed.ok() || !parsed->is_object()) {
    AppendParameter("arguments", true, arguments, &out);
    return out;
  }
  for (auto item = parsed->begin(); item != parsed->end(); ++item) {
    if (item != parsed->begin()) out.push_back('\n');
    const bool is_string = item.value().is_string();
    AppendParameter(
        item.key(), is_string,
        is_string ? item.value().get_ref<const std::string&>() : PythonJson(item.value()), &out);
  }
  return out;
}

}  // namespace

std::string RenderToolCalls(const std::vector<ToolCall>& calls) {
  std::string out = absl::StrCat(kDsmlOpen, kToolCalls, ">\n");
  for (const ToolCall& call : calls) {
    absl::StrAppend(&out, kDsmlOpen, kInvoke, " name=\"", call.name, "\">\n");
    absl::StrAppend(&out, RenderArguments(call.arguments), "\n", kDsmlClose, kInvoke, ">\n");
  }
  absl::StrAppend(&out, kDsmlClose, kToolCalls, ">");
  return out;
}

}  // namespace isthmus::text
