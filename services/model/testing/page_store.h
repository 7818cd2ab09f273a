// SPDX-License-Identifier: Apache-2.0
// Pages and a state slot of one sequence for tests of the forward pass, filled with garbage first:
// what a pass did not write must not matter. The product's pools are services/kv, which stands
// beside this folder.
#pragma once

#include <cstring>
#include <vector>

#include "kernels/core/kv_layout.h"

namespace isthmus::model {

class PageStore {
 public:
  // Room for `num_tokens` tokens.
  PageStore(const kernels::KvLayout& layout, int64_t num_tokens)
      : state_(static_cast<size_t>(layout.state_slot_bytes), kGarbage) {
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
      const auto kind = static_cast<kernels::CacheKindIndex>(k);
      const int64_t count = layout.PagesFor(kind, num_tokens);
      for (int64_t p = 0; p < count; ++p) {
        bytes_.emplace_back(static_cast<size_t>(layout.kinds[k].bytes()), kGarbage);
        pages_[k].push_back(bytes_.back().data());
      }
    }
  }

  kernels::SequenceKv View(int64_t first_row, int64_t start_position, int64_t num_rows) {
    kernels::SequenceKv view;
    view.first_row = first_row;
    view.num_rows = num_rows;
    view.start_position = start_position;
    for (int k = 0; k < kernels::kNumPagedKinds; ++k) view.pages[k] = pages_[k];
    view.state = state_.data();
    return view;
  }

 private:
  // As an f32 a large negative number, as codes and scales far from zero.
  static constexpr std::byte kGarbage{0xcd};

  std::vector<std::vector<std::byte>> bytes_;  // Moving a vector keeps its bytes in place.
  std::vector<std::byte> state_;
  std::array<std::vector<std::byte*>, kernels::kNumPagedKinds> pages_;
};

}  // namespace isthmus::model
