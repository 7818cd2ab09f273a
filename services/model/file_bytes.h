// SPDX-License-Identifier: Apache-2.0
// A small file as a string, with a bound.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isthmus::model {

// All bytes of the regular file at `path`. InvalidArgument: not a regular file, or longer than
// `max_bytes`. Otherwise the code and text of errno (NotFound, PermissionDenied, ...).
absl::StatusOr<std::string> ReadFileBytes(const std::string& path, int64_t max_bytes);

}  // namespace isthmus::model
