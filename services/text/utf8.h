// SPDX-License-Identifier: Apache-2.0
// UTF-8 as the Unicode standard defines it: no overlong forms, no surrogates, nothing above
// U+10FFFF. An invalid sequence is cut into maximal subparts (Unicode 15, chapter 3.9), each of
// which becomes one U+FFFD; Python and Rust do the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

inline constexpr absl::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

enum class Utf8Kind : uint8_t {
  kCharacter,   // `size` bytes are one code point.
  kInvalid,     // `size` bytes are a maximal subpart that no further byte can complete.
  kIncomplete,  // All remaining bytes are a proper prefix of a code point.
};

struct Utf8Step {
  Utf8Kind kind = Utf8Kind::kInvalid;
  size_t size = 0;
  char32_t code_point = 0;  // Only for kCharacter.
};

// What the bytes from `offset` on begin with. Requires offset < bytes.size().
Utf8Step NextUtf8(absl::string_view bytes, size_t offset);

// Byte offset of the first byte that is not part of a whole code point; nothing when all is valid.
std::optional<size_t> FirstInvalidUtf8(absl::string_view bytes);

// InvalidArgument with `name`, the offset and the byte unless `bytes` is valid UTF-8.
absl::Status CheckUtf8(absl::string_view name, absl::string_view bytes);

// Appends the UTF-8 form of a scalar value (not a surrogate, at most U+10FFFF).
void AppendUtf8(char32_t code_point, std::string* out);

}  // namespace isthmus::text
