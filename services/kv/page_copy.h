// SPDX-License-Identifier: Apache-2.0
// The copies that sharing a prefix takes: the entries of a page that a hit ends inside, and the
// state slot at a block's end. On the host by memcpy; of a GPU on the device, which must have done
// all work that writes them. Both return when the bytes are there.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/core/kv_layout.h"
#include "services/kv/page_pool.h"

namespace isthmus::kv {

// The entries of the first `num_tokens` tokens of a page of `kind`, from one page of `pool` to
// another. What lies behind them may be written meanwhile.
absl::Status CopyEntries(PagePool& pool, const kernels::CacheKind& kind, int64_t num_tokens,
                         int32_t from, int32_t to);

// Bytes of a state slot that mean something at the end of a block: all but the rows of ratio 128,
// of which there are none then (model specification 3.9).
int64_t SnapshotBytes(const kernels::KvLayout& layout);

// The first `bytes` of a page of one pool to a page of another, in the same memory.
absl::Status CopyBytes(const PagePool& from_pool, int32_t from, const PagePool& to_pool, int32_t to,
                       int64_t bytes);

}  // namespace isthmus::kv
