// SPDX-License-Identifier: Apache-2.0
// Translates a Split pattern of tokenizer.json into the syntax of PCRE2.
//
// Hugging Face runs these patterns with Oniguruma. Most of the syntax is shared, but some of it
// means something else (\h, \s with U+180E, `[` and `&&` inside a class, `}+`), and a silent
// difference would change token ids. So only constructs with one meaning in both are let through:
// literals, classes, \p{..} and \P{..} of L M N P S Z, \s \S \r \n \t and escaped
// punctuation, (?:..) (?!..) (?=..), alternation, and the quantifiers ? * + {m} {m,} {m,n}.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

// The pattern for pcre2_compile with PCRE2_UTF | PCRE2_UCP. `pattern` must be valid UTF-8.
// Errors: Unimplemented, naming the construct and its byte offset; InvalidArgument when the
// pattern is longer than 4,096 bytes.
absl::StatusOr<std::string> TranslatePattern(absl::string_view pattern);

}  // namespace isthmus::text
