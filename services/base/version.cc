// SPDX-License-Identifier: Apache-2.0
#include "services/base/version.h"

#include "absl/strings/str_cat.h"
#include "services/base/version_values.h"

namespace isthmus {

absl::string_view SemanticVersion() { return ISTHMUS_VERSION_VALUE; }

absl::string_view GitCommit() { return ISTHMUS_COMMIT_VALUE; }

std::string VersionLine(absl::string_view program) {
  return absl::StrCat(program, " ", SemanticVersion(), " (commit ", GitCommit(), ", protocol ",
                      kProtocolVersion, ")");
}

}  // namespace isthmus
