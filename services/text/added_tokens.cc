// SPDX-License-Identifier: Apache-2.0
// Added tokens by a byte trie, walked from every place that may begin one. The walk is bounded by
// the longest token, and the tokens come from the checkpoint, not from the text.
#include "services/text/added_tokens.h"

namespace isthmus::text {

void AddedTokenTrie::Insert(absl::string_view content, int32_t token_id) {
  uint32_t node = 0;
  for (const char c : content) {
    const uint64_t edge = (uint64_t{node} << 8) | static_cast<uint8_t>(c);
    const auto [found, inserted] =
        edges_.try_emplace(edge, static_cast<uint32_t>(node_token_.size()));
    if (inserted) node_token_.push_back(-1);
    node = found->second;
  }
  node_token_[node] = token_id;
  starts_[static_cast<uint8_t>(content.front())] = true;
}

AddedTokenTrie::Match AddedTokenTrie::LongestAt(absl::string_view text, size_t offset) const {
  Match longest;
  uint32_t node = 0;
  for (size_t i = offset; i < text.size(); ++i) {
    const auto edge = edges_.find((uint64_t{node} << 8) | static_cast<uint8_t>(text[i]));
    if (edge == edges_.end()) break;
    node = edge->second;
    if (node_token_[node] >= 0) longest = {node_token_[node], i + 1 - offset};
  }
  return longest;
}

std::vector<Segment> AddedTokenTrie::Cut(const std::vector<Segment>& segments) const {
  std::vector<Segment> out;
  out.reserve(segments.size());
  for (const Segment& segment : segments) {
    if (segment.token_id >= 0) {
      out.push_back(segment);
      continue;
    }
    const absl::string_view text = segment.text;
    size_t plain = 0;
    size_t i = 0;
    while (i < text.size()) {
      const Match match = starts_[static_cast<uint8_t>(text[i])] ? LongestAt(text, i) : Match{};
      if (match.token_id < 0) {
        ++i;
        continue;
      }
      if (i > plain) out.push_back({text.substr(plain, i - plain), -1});
      out.push_back({text.substr(i, match.bytes), match.token_id});
      i += match.bytes;
      plain = i;
    }
    if (plain < text.size()) out.push_back({text.substr(plain), -1});
  }
  return out;
}

}  // namespace isthmus::text
