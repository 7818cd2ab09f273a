// SPDX-License-Identifier: Apache-2.0
#include "services/kv/page_copy.h"

#include <cstring>

#include "services/base/check.h"
#include "services/base/status_macros.h"

namespace isthmus::kv {
namespace {

// A run of bytes on its way; of a GPU it is enqueued only.
absl::Status CopyRun(int device, std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  if (device != kHostMemory) return kernels::CopyOnDevice(to, from, bytes, nullptr);
  std::memcpy(to, from, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

}  // namespace

absl::Status CopyEntries(PagePool& pool, const kernels::CacheKind& kind, int64_t num_tokens,
                         int32_t from, int32_t to) {
  ISTHMUS_CHECK(kind.tokens_per_entry > 0 && num_tokens % kind.tokens_per_entry == 0);
  const int64_t entries = num_tokens / kind.tokens_per_entry;
  const int device = pool.arena().device();
  return OnEveryRank(pool.arena(), [&](int rank) -> absl::Status {
    std::byte* const target = pool.address_of(rank, to);
    const std::byte* const source = pool.address_of(rank, from);
    for (size_t layer = 0; layer < kind.layers.size(); ++layer) {
      // Planar: all data bytes of the layer's entries, then all scale bytes.
      const int64_t data = static_cast<int64_t>(layer) * kind.layer_bytes();
      const int64_t scales = data + int64_t{kind.entries} * kind.entry_data_bytes;
      ISTHMUS_RETURN_IF_ERROR(
          CopyRun(device, target + data, source + data, entries * kind.entry_data_bytes));
      ISTHMUS_RETURN_IF_ERROR(
          CopyRun(device, target + scales, source + scales, entries * kind.entry_scale_bytes));
    }
    return absl::OkStatus();
  });
}

int64_t SnapshotBytes(const kernels::KvLayout& layout) {
  return layout.kinds[kernels::kHcaState].offset;  // The last kind of a slot.
}

absl::Status CopyBytes(const PagePool& from_pool, int32_t from, const PagePool& to_pool, int32_t to,
                       int64_t bytes) {
  ISTHMUS_CHECK(bytes <= from_pool.page_bytes() && bytes <= to_pool.page_bytes());
  const int device = to_pool.arena().device();
  ISTHMUS_CHECK(from_pool.arena().device() == device);
  ISTHMUS_CHECK(from_pool.arena().num_ranks() == to_pool.arena().num_ranks());
  return OnEveryRank(to_pool.arena(), [&](int rank) {
    return CopyRun(device, to_pool.address_of(rank, to), from_pool.address_of(rank, from), bytes);
  });
}

}  // namespace isthmus::kv
