// SPDX-License-Identifier: Apache-2.0
// JSON as Python reads and prints it: the chat format is defined by `json.dumps(value,
// ensure_ascii=False)`, and the model was trained on those bytes (spec 7.3).
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

// Parses a request, keeping the order of keys and every digit of integers. At most 512 levels and
// 4,096 members per object. `name` stands in front of error messages.
// Errors: InvalidArgument (syntax, invalid UTF-8, limits, a number beyond the range of double).
absl::StatusOr<nlohmann::ordered_json> ParseChatJson(absl::string_view name,
                                                     absl::string_view text);

// What json.dumps(value, ensure_ascii=False) prints: ", " and ": " between items, shortest floats
// that read back the same, `1e-07`, `1e+16`, control characters escaped. Floats that are not
// finite print as Python's NaN, Infinity and -Infinity.
std::string PythonJson(const nlohmann::ordered_json& value);

// The same for one string, with its quotes. Bytes that are not UTF-8 pass unchanged.
std::string PythonJsonString(absl::string_view value);

// Whether `text` is one JSON value, surrounded by white space at most. Bounded like ParseChatJson.
bool IsJson(absl::string_view text);

}  // namespace isthmus::text
