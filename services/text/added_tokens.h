// SPDX-License-Identifier: Apache-2.0
// Finds added tokens (`<｜User｜>`, `</think>`) literally in raw text: the leftmost match first, at
// one place the longest, as Hugging Face does with its Aho-Corasick automaton.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

// A span of text that is either one added token or text still to be encoded.
struct Segment {
  absl::string_view text;
  int32_t token_id = -1;  // -1: plain text.
};

// A trie over bytes. Immutable after the last Insert.
class AddedTokenTrie {
 public:
  // `content` must not be empty; inserting a content twice keeps the second id.
  void Insert(absl::string_view content, int32_t token_id);

  // Cuts every plain segment of `segments` at the tokens of this trie.
  std::vector<Segment> Cut(const std::vector<Segment>& segments) const;

 private:
  struct Match {
    int32_t token_id = -1;
    size_t bytes = 0;
  };
  Match LongestAt(absl::string_view text, size_t offset) const;

  // (node << 8 | byte) -> node. Node 0 is the root.
  absl::flat_hash_map<uint64_t, uint32_t> edges_;
  std::vector<int32_t> node_token_ = {-1};
  bool starts_[256] = {};  // Bytes that begin some token: most of a text is passed over here.
};

}  // namespace isthmus::text
