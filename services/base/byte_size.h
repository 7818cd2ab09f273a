// SPDX-License-Identifier: Apache-2.0
// Sizes of memory as people write them: "96GiB", "512MiB", "80GB", "1048576".
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus {

// Bytes of a whole number with an optional unit: B, KiB, MiB, GiB, TiB (powers of 1024), kB, MB,
// GB, TB (powers of 1000). InvalidArgument, with the text, for anything else, and for what 63 bits
// cannot hold.
absl::StatusOr<int64_t> ParseByteSize(absl::string_view text);

// "3.76 GiB": for people; two decimals from KiB on.
std::string FormatByteSize(int64_t bytes);

}  // namespace isthmus
