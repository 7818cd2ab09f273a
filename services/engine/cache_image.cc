// SPDX-License-Identifier: Apache-2.0
#include "services/engine/cache_image.h"

#include <algorithm>
#include <cstring>

#include "kernels/core/device.h"
#include "kernels/core/state_rows.h"
#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::engine {
namespace {

using kernels::CacheKind;
using kernels::CacheKindIndex;
using kernels::KvLayout;

bool IsPaged(CacheKindIndex kind) { return kind < kernels::kNumPagedKinds; }

const CacheKind& KindOf(const KvLayout& layout, CacheKindIndex kind) {
  return layout.kinds[static_cast<size_t>(kind)];
}

kv::PagePool& PoolOf(kv::CachePool& pool, CacheKindIndex kind) {
  return IsPaged(kind) ? pool.pages(kind) : pool.slots();
}

// The pages that hold the rows; of a fixed-size kind the slot.
std::vector<int32_t> PagesOf(const KvLayout& layout, const kv::SequenceCache& cache,
                             CacheKindIndex kind, const CacheRows& rows) {
  if (rows.count == 0) return {};
  if (!IsPaged(kind)) return {cache.slot()};
  const int64_t entries = KindOf(layout, kind).entries;
  const auto pages = cache.pages(kind).first(
      static_cast<size_t>((rows.first + rows.count + entries - 1) / entries));
  return {pages.begin(), pages.end()};
}

// Calls copy(in page or slot, in image, bytes) for every run of bytes that a row has in both; the
// offsets count from the page's and from the kind's first byte.
template <typename Copy>
void ForEachPiece(const KvLayout& layout, CacheKindIndex kind_index, const CacheRows& rows,
                  int64_t page, Copy copy) {
  const CacheKind& kind = KindOf(layout, kind_index);
  int64_t first = rows.first;
  int64_t end = rows.first + rows.count;
  if (IsPaged(kind_index)) {
    first = std::max(first, page * kind.entries);
    end = std::min(end, (page + 1) * kind.entries);
  }
  int64_t layer_start = 0;
  for (const int layer : kind.layers) {
    const kernels::EntryPlane plane = layout.Plane(kind_index, layer);
    const int64_t scales = layer_start + rows.count * plane.data_bytes;
    for (int64_t row = first; row < end; ++row) {
      const int64_t in_plane = row % plane.entries;
      const int64_t in_image = row - rows.first;
      copy(plane.data_offset + in_plane * plane.data_bytes,
           layer_start + in_image * plane.data_bytes, static_cast<size_t>(plane.data_bytes));
      copy(plane.scale_offset + in_plane * plane.scale_bytes, scales + in_image * plane.scale_bytes,
           static_cast<size_t>(plane.scale_bytes));
    }
    layer_start = scales + rows.count * plane.scale_bytes;
  }
}

// A page or slot in host memory: itself, or what it is copied to and from.
class HostPage {
 public:
  HostPage(kv::PagePool& pool, int32_t page) : pool_(pool), page_(page) {
    if (is_on_host()) return;
    copy_.resize(static_cast<size_t>(pool.page_bytes()));
  }

  std::byte* bytes() { return is_on_host() ? pool_.address(page_) : copy_.data(); }

  absl::Status Fetch() {
    if (is_on_host()) return absl::OkStatus();
    ISTHMUS_RETURN_IF_ERROR(kernels::UseDevice(pool_.arena().device()));
    ISTHMUS_RETURN_IF_ERROR(
        kernels::CopyToHost(copy_.data(), pool_.address(page_), pool_.page_bytes(), nullptr));
    return kernels::DeviceStream().Synchronise();
  }
  absl::Status Store() {
    if (is_on_host()) return absl::OkStatus();
    return kv::OnEveryRank(pool_.arena(), [&](int rank) {
      return kernels::CopyToDevice(pool_.address_of(rank, page_), copy_.data(), pool_.page_bytes(),
                                   nullptr);
    });
  }

 private:
  bool is_on_host() const { return pool_.arena().device() == kv::kHostMemory; }

  kv::PagePool& pool_;
  const int32_t page_;
  std::vector<std::byte> copy_;
};

absl::Status FillKind(kv::CachePool& pool, const kv::SequenceCache& cache, CacheKindIndex kind,
                      int64_t num_tokens, std::span<const std::byte> image) {
  const KvLayout& layout = pool.layout();
  const CacheRows rows = RowsOf(layout, kind, num_tokens);
  ISTHMUS_CHECK(static_cast<int64_t>(image.size()) == ImageBytes(layout, kind, num_tokens));
  const std::vector<int32_t> pages = PagesOf(layout, cache, kind, rows);
  for (size_t i = 0; i < pages.size(); ++i) {
    HostPage page(PoolOf(pool, kind), pages[i]);
    // The slot holds the kinds that were filled before this one; a page is all its own.
    if (!IsPaged(kind)) ISTHMUS_RETURN_IF_ERROR(page.Fetch());
    ForEachPiece(layout, kind, rows, static_cast<int64_t>(i),
                 [&](int64_t in_page, int64_t in_image, size_t bytes) {
                   std::memcpy(page.bytes() + in_page, image.data() + in_image, bytes);
                 });
    ISTHMUS_RETURN_IF_ERROR(page.Store());
  }
  return absl::OkStatus();
}

}  // namespace

CacheRows RowsOf(const KvLayout& layout, CacheKindIndex kind, int64_t num_tokens) {
  if (KindOf(layout, kind).layers.empty()) return {};
  if (IsPaged(kind)) return {0, num_tokens / KindOf(layout, kind).tokens_per_entry};
  const int64_t first = kernels::OldestStateRow(layout, kind, num_tokens);
  return {first, num_tokens - first};
}

int64_t ImageBytes(const KvLayout& layout, CacheKindIndex kind_index, int64_t num_tokens) {
  const CacheKind& kind = KindOf(layout, kind_index);
  return RowsOf(layout, kind_index, num_tokens).count * static_cast<int64_t>(kind.layers.size()) *
         (kind.entry_data_bytes + kind.entry_scale_bytes);
}

absl::Status AppendCacheKind(kv::CachePool& pool, const kv::SequenceCache& cache,
                             CacheKindIndex kind, std::vector<std::byte>& out) {
  const KvLayout& layout = pool.layout();
  const CacheRows rows = RowsOf(layout, kind, cache.num_tokens());
  const size_t start = out.size();
  out.resize(start + static_cast<size_t>(ImageBytes(layout, kind, cache.num_tokens())));
  const std::vector<int32_t> pages = PagesOf(layout, cache, kind, rows);
  for (size_t i = 0; i < pages.size(); ++i) {
    HostPage page(PoolOf(pool, kind), pages[i]);
    ISTHMUS_RETURN_IF_ERROR(page.Fetch());
    ForEachPiece(layout, kind, rows, static_cast<int64_t>(i),
                 [&](int64_t in_page, int64_t in_image, size_t bytes) {
                   std::memcpy(out.data() + start + in_image, page.bytes() + in_page, bytes);
                 });
  }
  return absl::OkStatus();
}

absl::Status FillCache(kv::CachePool& pool, int64_t num_tokens,
                       std::span<const std::span<const std::byte>> kinds,
                       kv::SequenceCache& cache) {
  ISTHMUS_CHECK(cache.is_open() && cache.capacity_tokens() >= num_tokens);
  ISTHMUS_CHECK(kinds.size() == kernels::kNumCacheKinds);
  for (int k = 0; k < kernels::kNumCacheKinds; ++k) {
    ISTHMUS_RETURN_IF_ERROR(FillKind(pool, cache, static_cast<CacheKindIndex>(k), num_tokens,
                                     kinds[static_cast<size_t>(k)]));
  }
  return cache.SetNumTokens(num_tokens);
}

}  // namespace isthmus::engine
