// SPDX-License-Identifier: Apache-2.0
// Which build this is, and which wire protocol it speaks.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace isthmus {

// Of the messages in proto/ and of what kvtransfer writes. Raised by a change that an older peer
// would misread; workers of another value are refused with both.
inline constexpr uint32_t kProtocolVersion = 3;

// "0.1.0", as in CMakeLists.txt.
absl::string_view SemanticVersion();

// The git commit at configuration, or "unknown" where there was no git.
absl::string_view GitCommit();

// "isthmus-router 0.1.0 (commit 0123abc, protocol 1)", as --version prints it.
std::string VersionLine(absl::string_view program);

}  // namespace isthmus
