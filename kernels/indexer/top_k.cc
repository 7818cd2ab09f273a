// SPDX-License-Identifier: Apache-2.0
// Exact selection under one total order: a score and its index become one integer, so that there
// are no ties and the result cannot depend on the algorithm.
#include <algorithm>

#include "kernels/indexer/indexer_variants.h"

namespace isthmus::kernels {
namespace {

// Ascending in this is: larger score first, NaN last; then smaller index.
uint64_t SortKey(float score, int64_t j) {
  return uint64_t{ScoreRank(score)} << 32 | static_cast<uint32_t>(j);
}

}  // namespace

void SelectTopK(const float* scores, int64_t visible, int64_t topk, uint64_t* keys,
                int32_t* selected) {
  for (int64_t j = 0; j < visible; ++j) keys[j] = SortKey(scores[j], j);
  const int64_t count = std::min(topk, visible);
  if (count < visible) std::nth_element(keys, keys + count, keys + visible);
  std::sort(keys, keys + count);
  for (int64_t k = 0; k < count; ++k) {
    selected[k] = static_cast<int32_t>(keys[k] & 0xffffffffu);
  }
  std::fill(selected + count, selected + topk, -1);
}

}  // namespace isthmus::kernels
