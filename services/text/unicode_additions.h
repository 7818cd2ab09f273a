// SPDX-License-Identifier: Apache-2.0
// Characters that Unicode gained between 14.0 (Debian 12's PCRE2) and 16.0 (Hugging Face's
// `tokenizers` 0.23). Without them, text in new scripts would be split in other places, depending
// on the distribution's library.
#pragma once

#include "absl/types/span.h"

namespace isthmus::text {

struct CodePointRange {
  char32_t first = 0;
  char32_t last = 0;  // Inclusive.
};

// For a general category by its letter: L, M, N, P or S; empty for others. Ascending.
absl::Span<const CodePointRange> UnicodeAdditions(char category);

}  // namespace isthmus::text
