// SPDX-License-Identifier: Apache-2.0
#include "services/text/stop_strings.h"

#include <algorithm>
#include <utility>

namespace isthmus::text {

StopStrings::StopStrings(std::vector<std::string> strings, bool keeps_match)
    : keeps_match_(keeps_match) {
  for (std::string& string : strings) {
    Pattern pattern;
    pattern.shorter.assign(string.size() + 1, 0);
    for (size_t length = 2; length <= string.size(); ++length) {
      size_t shorter = pattern.shorter[length - 1];
      while (shorter > 0 && string[shorter] != string[length - 1]) {
        shorter = pattern.shorter[shorter];
      }
      pattern.shorter[length] = string[shorter] == string[length - 1] ? shorter + 1 : 0;
    }
    pattern.string = std::move(string);
    patterns_.push_back(std::move(pattern));
  }
}

void StopStrings::Pattern::Advance(char c) {
  if (matched == string.size()) matched = shorter[matched];
  while (matched > 0 && string[matched] != c) matched = shorter[matched];
  if (string[matched] == c) ++matched;
}

std::string StopStrings::Push(absl::string_view text, bool may_match) {
  if (match_.has_value()) return {};
  for (const char c : text) {
    held_.push_back(c);
    const Pattern* complete = nullptr;
    for (Pattern& pattern : patterns_) {
      pattern.Advance(c);
      if (pattern.matched < pattern.string.size()) continue;
      if (complete == nullptr || pattern.string.size() > complete->string.size()) {
        complete = &pattern;
      }
    }
    if (complete == nullptr || !may_match) continue;
    match_ = complete->string;
    if (!keeps_match_) held_.resize(held_.size() - match_->size());
    return std::exchange(held_, {});
  }
  // A string that is complete and does not count holds back only what may begin another one.
  size_t kept = 0;
  for (const Pattern& pattern : patterns_) {
    const bool is_complete = pattern.matched == pattern.string.size();
    kept = std::max(kept, is_complete ? pattern.shorter[pattern.matched] : pattern.matched);
  }
  std::string certain = held_.substr(0, held_.size() - kept);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopStrings::Finish() { return std::exchange(held_, {}); }

}  // namespace isthmus::text
