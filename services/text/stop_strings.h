// SPDX-License-Identifier: Apache-2.0
// Looks for stop strings in text that comes piece by piece. What may still turn out to begin one is
// held back, so that however the text is cut into pieces, what comes out is the same.
//
// The first string to be complete counts; of several that are complete at the same byte, the
// longest. So nothing has to be held back longer than the longest string.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace isthmus::text {

// One per text; not for several threads at once.
class StopStrings {
 public:
  // `strings` are UTF-8 and not empty; there may be none. `keeps_match`: the text ends with the
  // string that was found, not before it.
  explicit StopStrings(std::vector<std::string> strings, bool keeps_match = false);

  // The text that became certain. Where `may_match` is false no string is complete, but one may
  // begin. After a match nothing comes any more. Never ends inside a character when `text` does
  // not.
  std::string Push(absl::string_view text, bool may_match = true);

  // The end of the text: what was held back.
  std::string Finish();

  // Which string was found.
  const std::optional<std::string>& match() const { return match_; }

 private:
  // A string and how much of it the text ends with (Knuth, Morris and Pratt, 1977).
  struct Pattern {
    std::string string;
    // For each length of a matched prefix, the next shorter one that the same text ends with.
    std::vector<size_t> shorter;
    size_t matched = 0;

    void Advance(char c);
  };

  std::vector<Pattern> patterns_;
  const bool keeps_match_;
  std::string held_;  // Ends with every beginning of a string that is matched now.
  std::optional<std::string> match_;
};

}  // namespace isthmus::text
