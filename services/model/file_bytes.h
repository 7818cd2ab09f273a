// SPDX-License-Identifier: Apache-2.0
// A small file as a string, with a bound.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace isthmus::model {

// All bytes of the regular file at `path`. NotFound: there is none. InvalidArgument: not a regular
// file, or longer than `max_bytes`. Internal: any other error, with errno's text.
absl::StatusOr<std::string> ReadFileBytes(const std::string& path, int64_t max_bytes);

}  // namespace isthmus::model
