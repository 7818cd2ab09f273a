// SPDX-License-Identifier: Apache-2.0
// One sequence with all inputs of the indexer, for its tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/core/quantise.h"
#include "kernels/indexer/indexer_variants.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/sequence_cache.h"

namespace isthmus::kernels::testing {

struct IndexerShape {
  int64_t heads = 4;
  int64_t topk = 8;
  int dim = 128;
  Arithmetic arithmetic = Arithmetic::kMath;
};

class IndexerSequence {
 public:
  IndexerSequence(const IndexerShape& shape, int64_t tokens, uint64_t seed)
      : shape_(shape), layout_(Layout(shape)), cache_(layout_, tokens) {
    q = NormalValues(seed, tokens * shape.heads * shape.dim);
    w = NormalValues(seed + 1, tokens * shape.heads, 0.1f);
    if (shape.arithmetic == Arithmetic::kReference) {
      RoundTripFp4Row(q.data(), static_cast<int64_t>(q.size()), q.data());
      RoundBf16Row(w.data(), static_cast<int64_t>(w.size()), w.data());
    }
    std::vector<float> keys = NormalValues(seed + 2, tokens / kIndexRatio * shape.dim);
    for (int64_t j = 0; j < tokens / kIndexRatio; ++j) WriteKey(j, keys.data() + j * shape.dim);
  }

  void WriteKey(int64_t j, const float* x) {
    const PagedEntries entries = cache_.Entries(kIndexKey, plane());
    if (shape_.arithmetic == Arithmetic::kMath) {
      std::copy_n(x, shape_.dim, reinterpret_cast<float*>(entries.data(j)));
    } else {
      EncodeIndexKey(x, shape_.dim, entries.data(j), entries.scale(j));
    }
  }
  EntryPlane plane() const { return layout_.Plane(kIndexKey, 0); }

  // Arguments of rows [begin, end), `selected` of the same rows; valid until the next call.
  IndexerArgs Args(int64_t begin, int64_t end, int32_t* selected) {
    view_ = cache_.View(0, end - begin, begin);
    const int64_t width = shape_.heads * shape_.dim;
    IndexerArgs args;
    args.q = F32Matrix(q.data() + begin * width, end - begin, width);
    args.w = F32Matrix(w.data() + begin * shape_.heads, end - begin, shape_.heads);
    args.num_heads = shape_.heads;
    args.dim = shape_.dim;
    args.topk = shape_.topk;
    args.sequences = {&view_, 1};
    args.key_plane = plane();
    args.selected = selected;
    args.arithmetic = shape_.arithmetic;
    return args;
  }
  SequenceCache& cache() { return cache_; }

  std::vector<float> q;
  std::vector<float> w;

 private:
  static KvLayout Layout(const IndexerShape& shape) {
    KvGeometry geometry;
    geometry.compress_ratios = {kIndexRatio};
    geometry.head_dim = 128;
    geometry.index_head_dim = shape.dim;
    geometry.arithmetic = shape.arithmetic;
    return *KvLayout::Create(geometry);
  }

  IndexerShape shape_;
  KvLayout layout_;
  SequenceCache cache_;
  SequenceKv view_;
};

}  // namespace isthmus::kernels::testing
