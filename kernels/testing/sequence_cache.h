// SPDX-License-Identifier: Apache-2.0
// The pages and the state slot of one sequence, for tests of operations that read and write them.
// Every byte starts as 0xff, a NaN in every format, so that reading what nobody wrote shows.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/core/kv_layout.h"

namespace isthmus::kernels::testing {

class SequenceCache {
 public:
  SequenceCache(const KvLayout& layout, int64_t max_tokens) {
    for (size_t kind = 0; kind < kNumPagedKinds; ++kind) {
      const int64_t count = layout.PagesFor(static_cast<CacheKindIndex>(kind), max_tokens);
      const int64_t words = layout.kinds[kind].bytes() / 8 + 1;
      for (int64_t i = 0; i < count; ++i) {
        pages_[kind].push_back(Storage(static_cast<size_t>(words), ~uint64_t{0}));
      }
      for (Storage& page : pages_[kind]) {
        addresses_[kind].push_back(reinterpret_cast<std::byte*>(page.data()));
      }
    }
    state_.assign(static_cast<size_t>(layout.state_slot_bytes / 8 + 1), ~uint64_t{0});
  }
  SequenceCache(const SequenceCache&) = delete;
  SequenceCache& operator=(const SequenceCache&) = delete;

  SequenceKv View(int64_t first_row, int64_t num_rows, int64_t start_position) {
    SequenceKv out;
    out.first_row = first_row;
    out.num_rows = num_rows;
    out.start_position = start_position;
    for (size_t kind = 0; kind < kNumPagedKinds; ++kind) out.pages[kind] = addresses_[kind];
    out.state = state();
    return out;
  }
  PagedEntries Entries(CacheKindIndex kind, const EntryPlane& plane) {
    return {addresses_[kind], plane};
  }
  std::byte* state() { return reinterpret_cast<std::byte*>(state_.data()); }

  // Bytes for comparing two caches.
  const std::vector<uint64_t>& state_words() const { return state_; }
  const std::vector<std::vector<uint64_t>>& page_words(CacheKindIndex kind) const {
    return pages_[kind];
  }

 private:
  using Storage = std::vector<uint64_t>;  // As words, so that f32 entries are aligned.
  std::array<std::vector<Storage>, kNumPagedKinds> pages_;
  std::array<std::vector<std::byte*>, kNumPagedKinds> addresses_;
  Storage state_;
};

}  // namespace isthmus::kernels::testing
