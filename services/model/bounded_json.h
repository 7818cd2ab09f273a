// SPDX-License-Identifier: Apache-2.0
// JSON of untrusted origin: strict UTF-8, no doubled keys, bounded nesting. A doubled key would let
// two readers of one checkpoint see two different tensors, so it is an error here.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace isthmus::model {

inline constexpr int kMaxJsonDepth = 32;

// InvalidArgument starts with `what` (a file name) and says where the text breaks the rules. Never
// throws, whatever the bytes are.
absl::StatusOr<nlohmann::json> ParseBoundedJson(absl::string_view text, absl::string_view what);

// A name from a file as it may stand in a message: control characters escaped, 200 bytes at most.
std::string PrintableName(absl::string_view name);

}  // namespace isthmus::model
