// SPDX-License-Identifier: Apache-2.0
// One sequence with all inputs of the compressor, for its tests.
#pragma once

#include <cmath>
#include <optional>
#include <vector>

#include "kernels/compressor/compressor_variants.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/sequence_cache.h"

namespace isthmus::kernels::testing {

struct CompressorShape {
  int dim = 128;  // head_dim, or index_head_dim for index keys.
  int ratio = 4;
  bool is_index_key = false;
  Arithmetic arithmetic = Arithmetic::kMath;
  std::optional<EntryFormat> key_format = std::nullopt;  // Of index keys; unset: the arithmetic's.
};

inline KvLayout LayoutOf(const CompressorShape& shape) {
  KvGeometry geometry;
  geometry.compress_ratios = {shape.ratio};
  geometry.head_dim = shape.is_index_key ? 128 : shape.dim;
  geometry.index_head_dim = shape.is_index_key ? shape.dim : 128;
  geometry.arithmetic = shape.arithmetic;
  geometry.index_key_format = shape.key_format;
  return *KvLayout::Create(geometry);
}

// One sequence of `tokens` positions with all inputs, cut into chunks as a test likes.
class CompressorSequence {
 public:
  CompressorSequence(const CompressorShape& shape, int64_t tokens, uint64_t seed)
      : shape_(shape), layout_(LayoutOf(shape)), cache_(layout_, tokens) {
    u = NormalValues(seed, tokens * width());
    g = NormalValues(seed + 1, tokens * width());
    ape = NormalValues(seed + 2, shape.ratio * width());
    norm_weight = NormalValues(seed + 3, shape.dim);
    frequency.resize(32);
    for (size_t i = 0; i < frequency.size(); ++i) {
      frequency[i] = std::pow(160000.0f, -static_cast<float>(i) / 32.0f);
    }
  }

  int64_t width() const { return shape_.ratio == 4 ? 2 * shape_.dim : shape_.dim; }
  CacheKindIndex kind() const {
    if (shape_.is_index_key) return kIndexKey;
    return shape_.ratio == 128 ? kHcaKv : kCsaKv;
  }
  EntryPlane entry_plane() const { return layout_.Plane(kind(), 0); }
  EntryPlane state_plane() const {
    if (shape_.is_index_key) return layout_.Plane(kIndexState, 0);
    return layout_.Plane(shape_.ratio == 128 ? kHcaState : kCsaState, 0);
  }

  // Arguments of rows [begin, end); valid until the next call.
  CompressorArgs Args(int64_t begin, int64_t end, float* entries) {
    view_ = cache_.View(0, end - begin, begin);
    const int64_t w = width();
    g_chunk_.assign(g.begin() + begin * w, g.begin() + end * w);  // Overwritten by the operation.
    CompressorArgs args;
    args.u = F32Matrix(u.data() + begin * w, end - begin, w);
    args.g = F32Matrix(g_chunk_.data(), end - begin, w);
    args.ape = F32Matrix(ape.data(), shape_.ratio, w);
    args.norm_weight = F32Vector(norm_weight.data(), shape_.dim);
    args.frequency = frequency;
    args.dim = shape_.dim;
    args.ratio = shape_.ratio;
    args.is_index_key = shape_.is_index_key;
    args.sequences = {&view_, 1};
    args.entry_plane = entry_plane();
    args.entry_kind = kind();
    args.state_plane = state_plane();
    args.entries = entries;
    args.arithmetic = shape_.arithmetic;
    return args;
  }

  std::vector<float> StateRow(int64_t position) {
    const std::byte* data =
        state_plane().data(cache_.state(), position % CompressorRing(shape_.ratio));
    const auto* row = reinterpret_cast<const float*>(data);
    return std::vector<float>(row, row + 2 * width());
  }
  SequenceCache& cache() { return cache_; }

  std::vector<float> u;
  std::vector<float> g;
  std::vector<float> ape;
  std::vector<float> norm_weight;
  std::vector<float> frequency;

 private:
  CompressorShape shape_;
  KvLayout layout_;
  SequenceCache cache_;
  SequenceKv view_;
  std::vector<float> g_chunk_;
};

}  // namespace isthmus::kernels::testing
