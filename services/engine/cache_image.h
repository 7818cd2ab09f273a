// SPDX-License-Identifier: Apache-2.0
// What a sequence has cached as bytes that depend on its tokens alone: neither on where its pages
// lie nor on what earlier tokens and earlier owners left in them. One run of bytes per cache kind:
// layer after layer, the data bytes of its entries in order of position, then their scale bytes.
// Windows and compressor rows go by position, not as images of their rings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "kernels/core/kv_layout.h"
#include "services/kv/sequence_cache.h"

namespace isthmus::engine {

// Entries or rows of one kind that a cache of `num_tokens` tokens consists of: floor(P / R) of a
// paged kind, of a fixed-size one those that later tokens may still read.
struct CacheRows {
  int64_t first = 0;  // Entry index, or position.
  int64_t count = 0;  // Per layer.
};
CacheRows RowsOf(const kernels::KvLayout& layout, kernels::CacheKindIndex kind, int64_t num_tokens);

// Bytes that the kind takes in an image.
int64_t ImageBytes(const kernels::KvLayout& layout, kernels::CacheKindIndex kind,
                   int64_t num_tokens);

// Appends the kind's bytes of `cache`, wherever its pages lie: of a GPU, which must have done all
// its work on them, page by page through host memory.
absl::Status AppendCacheKind(kv::CachePool& pool, const kv::SequenceCache& cache,
                             kernels::CacheKindIndex kind, std::vector<std::byte>& out);

// Writes every kind's bytes (ImageBytes of each, checked) into the pages and the slot of `cache`,
// which is open, has room for `num_tokens` tokens and shares no page, and says that it holds them.
absl::Status FillCache(kv::CachePool& pool, int64_t num_tokens,
                       std::span<const std::span<const std::byte>> kinds, kv::SequenceCache& cache);

}  // namespace isthmus::engine
