// SPDX-License-Identifier: Apache-2.0
#include "services/base/prefix_hash.h"

#define XXH_INLINE_ALL  // NOLINT(readability-identifier-naming): the name is xxHash's.
#include <xxhash.h>

#include <array>
#include <cstring>
#include <string>

#include "services/base/check.h"

namespace isthmus {
namespace {

PrefixHash HashOf(const void* bytes, size_t size) {
  const XXH128_hash_t hash = XXH3_128bits(bytes, size);
  return {hash.high64, hash.low64};
}

}  // namespace

PrefixHash PrefixRoot(absl::string_view salt, uint64_t layout_fingerprint,
                      uint64_t checkpoint_fingerprint) {
  // Fixed-size numbers first, so that no salt can stand for another salt with other numbers.
  const std::array<uint64_t, 2> numbers = {layout_fingerprint, checkpoint_fingerprint};
  std::string bytes(sizeof(numbers), '\0');
  std::memcpy(bytes.data(), numbers.data(), sizeof(numbers));
  bytes.append(salt.data(), salt.size());
  return HashOf(bytes.data(), bytes.size());
}

PrefixHash ExtendPrefix(const PrefixHash& parent, std::span<const int32_t> block) {
  ISTHMUS_CHECK(block.size() == static_cast<size_t>(kPrefixBlockTokens));
  struct {
    PrefixHash parent;
    std::array<int32_t, kPrefixBlockTokens> tokens;
  } link;
  static_assert(sizeof(link) == sizeof(PrefixHash) + sizeof(link.tokens), "no byte is unset");
  link.parent = parent;
  std::memcpy(link.tokens.data(), block.data(), block.size_bytes());
  return HashOf(&link, sizeof(link));
}

void ExtendChain(const PrefixHash& root, std::span<const int32_t> tokens,
                 std::vector<PrefixHash>& chain) {
  constexpr auto kBlock = static_cast<size_t>(kPrefixBlockTokens);
  const size_t num_blocks = tokens.size() / kBlock;
  chain.reserve(num_blocks);
  while (chain.size() < num_blocks) {
    const PrefixHash& parent = chain.empty() ? root : chain.back();
    chain.push_back(ExtendPrefix(parent, tokens.subspan(chain.size() * kBlock, kBlock)));
  }
}

}  // namespace isthmus
