// SPDX-License-Identifier: Apache-2.0
#include "services/diag/cache_dump.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kernels/core/device.h"
#include "kernels/core/quantise.h"
#include "services/base/status_macros.h"

namespace isthmus::diag {
namespace {

using kernels::CacheKindIndex;
using kernels::EntryPlane;
using kernels::KvLayout;

DumpTensor Tensor(const char* dtype, std::vector<int64_t> shape, const void* values,
                  int64_t element_bytes) {
  DumpTensor out;
  out.dtype = dtype;
  out.shape = std::move(shape);
  int64_t count = element_bytes;
  for (int64_t extent : out.shape) count *= extent;
  const auto* bytes = static_cast<const std::byte*>(values);
  out.bytes.assign(bytes, bytes + count);
  return out;
}

void AppendEntry(const EntryPlane& plane, const std::byte* data, const std::byte* scale,
                 std::vector<std::byte>& out) {
  out.insert(out.end(), data, data + plane.data_bytes);
  out.insert(out.end(), scale, scale + plane.scale_bytes);
}

std::string Key(int layer, const char* name) { return absl::StrCat("layer", layer, ".", name); }

// Rows of one compressor: the previous complete window (ratio 4) and the partial one.
void AddStateRows(const EntryPlane& plane, std::byte* state, int layer, const char* prefix,
                  int64_t ratio, int64_t num_tokens, Dump& dump) {
  const int64_t whole = num_tokens / ratio * ratio;
  const int64_t base = std::max<int64_t>(0, ratio == 4 ? whole - 4 : whole);
  const int64_t width = plane.data_bytes / 8;
  std::vector<float> u;
  std::vector<float> g;
  for (int64_t position = base; position < num_tokens; ++position) {
    const auto* row = reinterpret_cast<const float*>(plane.data(state, position % plane.entries));
    u.insert(u.end(), row, row + width);
    g.insert(g.end(), row + width, row + 2 * width);
  }
  const auto first = static_cast<int32_t>(base);
  dump[Key(layer, absl::StrCat(prefix, "_state_base").c_str())] = I32Tensor({1}, &first);
  if (u.empty()) return;  // Nothing that a future entry would read.
  const std::vector<int64_t> shape = {num_tokens - base, width};
  dump[Key(layer, absl::StrCat(prefix, "_state_u").c_str())] = F32Tensor(shape, u.data());
  dump[Key(layer, absl::StrCat(prefix, "_state_g").c_str())] = F32Tensor(shape, g.data());
}

}  // namespace

DumpTensor F32Tensor(std::vector<int64_t> shape, const float* values) {
  return Tensor("F32", std::move(shape), values, 4);
}

DumpTensor I32Tensor(std::vector<int64_t> shape, const int32_t* values) {
  return Tensor("I32", std::move(shape), values, 4);
}

void AddKvBytes(const KvLayout& layout, Dump& dump) {
  if (layout.kinds[kernels::kWindow].format != kernels::EntryFormat::kKvFp8) return;
  for (int layer : layout.kinds[kernels::kWindow].layers) {
    const auto found = dump.find(Key(layer, "kv"));
    if (found == dump.end()) continue;
    const EntryPlane plane = layout.Plane(kernels::kWindow, layer);
    const int64_t rows = found->second.shape[0];
    const auto* kv = reinterpret_cast<const float*>(found->second.bytes.data());
    std::vector<std::byte> bytes;
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<std::byte> data(static_cast<size_t>(plane.data_bytes));
      std::vector<std::byte> scale(static_cast<size_t>(plane.scale_bytes));
      kernels::EncodeKvEntry(kv + t * layout.geometry.head_dim, layout.geometry.head_dim,
                             layout.geometry.rope_dim, data.data(), scale.data());
      AppendEntry(plane, data.data(), scale.data(), bytes);
    }
    dump[Key(layer, "kv_bytes")] =
        Tensor("U8", {rows, plane.data_bytes + plane.scale_bytes}, bytes.data(), 1);
  }
}

absl::StatusOr<CacheCopy> CacheCopy::Of(const KvLayout& layout, const kv::SequenceCache& cache,
                                        int device) {
  CacheCopy out;
  out.view_ = cache.View(0, 0);
  out.num_tokens_ = cache.num_tokens();
  if (device == kv::kHostMemory) return out;
  ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(device));
  // A copy to pageable memory returns when it is done.
  const auto fetch = [&](const std::byte* from, int64_t bytes) -> absl::StatusOr<std::byte*> {
    out.bytes_.emplace_back(static_cast<size_t>(bytes));
    std::byte* const to = out.bytes_.back().data();
    ISTHMUS_RETURN_IF_ERROR(kernels::CopyToHost(to, from, bytes, nullptr));
    return to;
  };
  ISTHMUS_ASSIGN_OR_RETURN(out.view_.state, fetch(out.view_.state, layout.state_slot_bytes));
  for (size_t k = 0; k < kernels::kNumPagedKinds; ++k) {
    for (const std::byte* page : out.view_.pages[k]) {
      ISTHMUS_ASSIGN_OR_RETURN(std::byte* const copy, fetch(page, layout.kinds[k].bytes()));
      out.pages_[k].push_back(copy);
    }
    out.view_.pages[k] = out.pages_[k];
  }
  return out;
}

void AddEntryBytes(const KvLayout& layout, const CacheCopy& cache, int64_t first_token,
                   Dump& dump) {
  const kernels::SequenceKv& view = cache.view();
  for (int k = 0; k < kernels::kNumPagedKinds; ++k) {
    const kernels::CacheKind& kind = layout.kinds[k];
    const char* name = k == kernels::kIndexKey ? "index_key_bytes" : "compressed_bytes";
    for (int layer : kind.layers) {
      const EntryPlane plane = layout.Plane(static_cast<CacheKindIndex>(k), layer);
      const kernels::PagedEntries entries = {view.pages[k], plane};
      const int64_t first = first_token / kind.tokens_per_entry;
      const int64_t end = cache.num_tokens() / kind.tokens_per_entry;
      if (first >= end) continue;
      std::vector<std::byte> bytes;
      for (int64_t e = first; e < end; ++e) {
        AppendEntry(plane, entries.data(e), entries.scale(e), bytes);
      }
      dump[Key(layer, name)] =
          Tensor("U8", {end - first, plane.data_bytes + plane.scale_bytes}, bytes.data(), 1);
    }
  }
}

void AddStateSlot(const KvLayout& layout, const CacheCopy& cache, Dump& dump) {
  const kernels::SequenceKv& view = cache.view();
  const int64_t window = layout.geometry.window;
  std::vector<int32_t> positions(static_cast<size_t>(window), -1);
  for (int64_t p = std::max<int64_t>(0, cache.num_tokens() - window); p < cache.num_tokens(); ++p) {
    positions[static_cast<size_t>(p % window)] = static_cast<int32_t>(p);
  }
  dump["window_pos"] = I32Tensor({window}, positions.data());
  for (int layer : layout.kinds[kernels::kWindow].layers) {
    const EntryPlane plane = layout.Plane(kernels::kWindow, layer);
    std::vector<std::byte> bytes;
    for (int64_t slot = 0; slot < window; ++slot) {
      AppendEntry(plane, plane.data(view.state, slot), plane.scale(view.state, slot), bytes);
    }
    dump[Key(layer, "window_bytes")] =
        Tensor("U8", {window, plane.data_bytes + plane.scale_bytes}, bytes.data(), 1);
  }
  const int64_t tokens = cache.num_tokens();
  for (int layer : layout.kinds[kernels::kCsaState].layers) {
    AddStateRows(layout.Plane(kernels::kCsaState, layer), view.state, layer, "main", 4, tokens,
                 dump);
    AddStateRows(layout.Plane(kernels::kIndexState, layer), view.state, layer, "index", 4, tokens,
                 dump);
  }
  for (int layer : layout.kinds[kernels::kHcaState].layers) {
    AddStateRows(layout.Plane(kernels::kHcaState, layer), view.state, layer, "main", 128, tokens,
                 dump);
  }
}

}  // namespace isthmus::diag
