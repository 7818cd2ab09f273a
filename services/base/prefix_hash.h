// SPDX-License-Identifier: Apache-2.0
// Names of prompt prefixes: a chain of XXH3-128 over runs of 128 token ids, rooted in what else the
// cached bytes depend on. Equal names mean, for whoever does not look for collisions, equal tokens
// from the start on; whoever shares memory by them compares the tokens too (services/kv).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/strings/string_view.h"

namespace isthmus {

// Tokens of a block. At its multiples the state of a sequence is smallest (model specification
// 4.5), so prefixes are cut there and nowhere else.
inline constexpr int64_t kPrefixBlockTokens = 128;

struct PrefixHash {
  uint64_t high = 0;
  uint64_t low = 0;

  bool operator==(const PrefixHash&) const = default;
};

// For unordered containers: the hash is one already.
struct PrefixHashBits {
  size_t operator()(const PrefixHash& hash) const { return hash.low; }
};

// The name of no tokens: of a tenant's salt, a geometry of pages and a checkpoint. Everything below
// it differs between two of any.
PrefixHash PrefixRoot(absl::string_view salt, uint64_t layout_fingerprint,
                      uint64_t checkpoint_fingerprint);

// The name of the prefix `parent` with one block behind it. `block` has kPrefixBlockTokens ids.
PrefixHash ExtendPrefix(const PrefixHash& parent, std::span<const int32_t> block);

// Appends to `chain` the names of the whole blocks of `tokens` that it lacks: chain[b] names the
// first b + 1 blocks.
void ExtendChain(const PrefixHash& root, std::span<const int32_t> tokens,
                 std::vector<PrefixHash>& chain);

}  // namespace isthmus
