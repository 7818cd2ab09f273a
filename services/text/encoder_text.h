// SPDX-License-Identifier: Apache-2.0
// Fixed strings of the chat format (spec 7.2, 7.3): control tokens and the texts around tools.
#pragma once

#include "absl/strings/string_view.h"

namespace isthmus::text {

inline constexpr absl::string_view kBos = "<｜begin▁of▁sentence｜>";
inline constexpr absl::string_view kEos = "<｜end▁of▁sentence｜>";
inline constexpr absl::string_view kUser = "<｜User｜>";
inline constexpr absl::string_view kAssistant = "<｜Assistant｜>";
inline constexpr absl::string_view kLatestReminder = "<｜latest_reminder｜>";
inline constexpr absl::string_view kThinkBegin = "<think>";
inline constexpr absl::string_view kThinkEnd = "</think>";

// Tool calls (DSML, spec 7.5).
inline constexpr absl::string_view kDsmlOpen = "<｜DSML｜";
inline constexpr absl::string_view kDsmlClose = "</｜DSML｜";
inline constexpr absl::string_view kToolCalls = "tool_calls";
inline constexpr absl::string_view kInvoke = "invoke";
inline constexpr absl::string_view kParameter = "parameter";

// The reasoning effort prefix of "max" in the April encoder and of "high" in the 0731 encoder.
extern const absl::string_view kMaxEffortApril;

// Around the tool schemas in a system message; the second ends with a newline.
extern const absl::string_view kToolsBeforeSchemas;
extern const absl::string_view kToolsAfterSchemas;

// Before the schema of a response format.
extern const absl::string_view kResponseFormatHeading;

}  // namespace isthmus::text
