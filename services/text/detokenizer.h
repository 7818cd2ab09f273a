// SPDX-License-Identifier: Apache-2.0
// Token ids to text while they are generated. A token may end inside a character; its bytes are
// held back until the character is whole. Bytes that can never become one are replaced by U+FFFD
// as soon as that is certain, one per maximal subpart, as Python's errors="replace" does.
#pragma once

#include <cstdint>
#include <string>

#include "services/text/tokenizer.h"

namespace isthmus::text {

// One per sequence; not for several threads at once.
class Detokenizer {
 public:
  // `tokenizer` is not owned and must outlive this object. `skip_special`: tokens that
  // tokenizer.json marks as special stand for nothing.
  explicit Detokenizer(const Tokenizer* tokenizer, bool skip_special = false)
      : tokenizer_(tokenizer), skip_special_(skip_special) {}

  // The text that became complete with this token; may be empty. Always valid UTF-8. An id
  // outside the vocabulary stands for nothing.
  std::string Push(int32_t id);

  // The end of the sequence: what was held back, as U+FFFD. Afterwards a new sequence may begin.
  std::string Finish();

 private:
  // Moves what is decided from held_ to the result.
  std::string Decided(bool at_end);

  const Tokenizer* tokenizer_;
  const bool skip_special_;
  std::string held_;  // Less than four bytes between calls.
};

}  // namespace isthmus::text
