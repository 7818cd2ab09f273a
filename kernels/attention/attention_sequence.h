// SPDX-License-Identifier: Apache-2.0
// One sequence with all inputs of attention, for its tests and its benchmark.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/attention/attention_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/quantise.h"
#include "kernels/testing/inputs.h"
#include "kernels/testing/sequence_cache.h"

namespace isthmus::kernels::testing {

struct AttentionShape {
  int64_t heads = 1;
  int head_dim = 128;
  int rope_dim = 64;
  int window = 128;
  int ratio = 0;
  Arithmetic arithmetic = Arithmetic::kMath;
};

inline KvLayout LayoutOf(const AttentionShape& shape) {
  KvGeometry geometry;
  geometry.compress_ratios = {shape.ratio};
  geometry.head_dim = shape.head_dim;
  geometry.rope_dim = shape.rope_dim;
  geometry.window = shape.window;
  geometry.arithmetic = shape.arithmetic;
  return *KvLayout::Create(geometry);
}

// One sequence of `tokens` positions with all inputs, cut into chunks as a test likes.
class AttentionSequence {
 public:
  AttentionSequence(const AttentionShape& shape, int64_t tokens, uint64_t seed)
      : shape_(shape), layout_(LayoutOf(shape)), cache_(layout_, tokens) {
    const int64_t d = shape.head_dim;
    q = NormalValues(seed, tokens * shape.heads * d);
    kv = NormalValues(seed + 1, tokens * d);
    sink = NormalValues(seed + 2, shape.heads);
    for (int64_t t = 0; t < tokens; ++t) RoundTrip(kv.data() + t * d);
    if (shape.ratio == 0) return;
    const int64_t num_entries = tokens / shape.ratio;
    std::vector<float> entries = NormalValues(seed + 3, num_entries * d);
    for (int64_t j = 0; j < num_entries; ++j) WriteEntry(j, entries.data() + j * d);
  }

  CacheKindIndex kind() const { return shape_.ratio == 128 ? kHcaKv : kCsaKv; }
  EntryPlane entry_plane() const {
    return shape_.ratio == 0 ? EntryPlane{} : layout_.Plane(kind(), 0);
  }

  void WriteEntry(int64_t j, float* x) {
    const PagedEntries entries = cache_.Entries(kind(), entry_plane());
    RoundTrip(x);
    Write(x, entry_plane().format, entries.data(j), entries.scale(j));
  }
  void WriteRing(int64_t position) {
    const EntryPlane plane = layout_.Plane(kWindow, 0);
    const int64_t slot = position % shape_.window;
    Write(kv.data() + position * shape_.head_dim, plane.format, plane.data(cache_.state(), slot),
          plane.scale(cache_.state(), slot));
  }

  // Arguments of rows [begin, end) with `out` of the same rows; valid while this object lives.
  AttentionArgs Args(int64_t begin, int64_t end, float* out) {
    view_ = cache_.View(0, end - begin, begin);
    const int64_t width = shape_.heads * shape_.head_dim;
    AttentionArgs args;
    args.q = F32Matrix(q.data() + begin * width, end - begin, width);
    args.chunk_kv = F32Matrix(kv.data() + begin * shape_.head_dim, end - begin, shape_.head_dim);
    args.out = F32Matrix(out, end - begin, width);
    args.sink = F32Vector(sink.data(), shape_.heads);
    args.num_heads = shape_.heads;
    args.head_dim = shape_.head_dim;
    args.rope_dim = shape_.rope_dim;
    args.scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
    args.window = shape_.window;
    args.ratio = shape_.ratio;
    args.sequences = {&view_, 1};
    args.window_plane = layout_.Plane(kWindow, 0);
    args.entry_plane = entry_plane();
    args.entry_kind = kind();
    args.arithmetic = shape_.arithmetic;
    if (!selected.empty()) {
      args.selected = selected.data() + begin * max_selected;
      args.max_selected = max_selected;
    }
    return args;
  }

  // For every position, up to `count` distinct visible entries in a scrambled order, then -1.
  void SelectSome(int64_t count, uint64_t seed) {
    const auto tokens = static_cast<int64_t>(kv.size()) / shape_.head_dim;
    Random random(seed);
    max_selected = count;
    selected.assign(static_cast<size_t>(tokens * count), -1);
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t visible = VisibleEntries(t, shape_.ratio);
      std::vector<int32_t> order(static_cast<size_t>(visible));
      for (size_t j = 0; j < order.size(); ++j) order[j] = static_cast<int32_t>(j);
      for (size_t j = order.size(); j > 1; --j) {
        std::swap(order[j - 1], order[static_cast<size_t>(random.Below(static_cast<int64_t>(j)))]);
      }
      const int64_t n = std::min(visible, count);
      std::copy_n(order.begin(), n, selected.begin() + t * count);
    }
  }

  SequenceCache& cache() { return cache_; }

  std::vector<float> q;
  std::vector<float> kv;
  std::vector<float> sink;
  std::vector<int32_t> selected;
  int64_t max_selected = 0;

 private:
  void RoundTrip(float* x) const {
    if (shape_.arithmetic == Arithmetic::kMath) return;
    RoundBf16Row(x, shape_.head_dim, x);
    RoundTripFp8Row(x, shape_.head_dim - shape_.rope_dim, kKvNopeBlock, x);
  }
  void Write(const float* x, EntryFormat format, std::byte* data, std::byte* scale) const {
    if (format == EntryFormat::kKvF32) {
      std::copy_n(x, shape_.head_dim, reinterpret_cast<float*>(data));
    } else {
      EncodeKvEntry(x, shape_.head_dim, shape_.rope_dim, data, scale);
    }
  }

  AttentionShape shape_;
  KvLayout layout_;
  SequenceCache cache_;
  SequenceKv view_;
};

}  // namespace isthmus::kernels::testing
