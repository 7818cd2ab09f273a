// SPDX-License-Identifier: Apache-2.0
// Byte pair encoding by merge rank: of all neighbouring pairs that have a rule, the one with the
// lowest rank is merged, the leftmost among equals, until none is left. O(n log n) per piece.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

// Pieces seen before and their tokens; of one Encode call, so it needs no lock. Bounded: when
// full it takes no more.
class PieceCache {
 public:
  const std::vector<int32_t>* Find(absl::string_view piece) const;
  void Insert(absl::string_view piece, const int32_t* ids, size_t count);

 private:
  static constexpr size_t kMaxPieces = 16384;
  static constexpr size_t kMaxPieceBytes = 64;  // Longer ones rarely come back.
  absl::flat_hash_map<std::string, std::vector<int32_t>> pieces_;
};

// Immutable once filled, so that threads may share it.
class Bpe {
 public:
  // The token of each single byte.
  void SetByteToken(uint8_t byte, int32_t token_id) { byte_tokens_[byte] = token_id; }

  // Rule `rank`: `left` followed by `right` becomes `merged`.
  // Errors: InvalidArgument when the pair already has a rule.
  absl::Status AddMerge(int32_t left, int32_t right, int32_t rank, int32_t merged);

  // Appends the tokens of `piece` to `ids`.
  void Encode(absl::string_view piece, PieceCache* cache, std::vector<int32_t>* ids) const;

 private:
  struct Rule {
    int32_t rank = 0;
    int32_t merged = 0;
  };
  static uint64_t Pair(int32_t left, int32_t right) {
    return (uint64_t{static_cast<uint32_t>(left)} << 32) | static_cast<uint32_t>(right);
  }
  void Merge(absl::string_view piece, std::vector<int32_t>* ids) const;

  std::array<int32_t, 256> byte_tokens_{};
  absl::flat_hash_map<uint64_t, Rule> rules_;
};

}  // namespace isthmus::text
