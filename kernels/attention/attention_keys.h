// SPDX-License-Identifier: Apache-2.0
// Where the keys of one query come from on the CPU: the window ring, the chunk and the pages. Keys
// are pointers to f32 rows in the order in which they are summed; stored fp8 entries are decoded
// into scratch, once per sequence where its queries share them, else once per query: by whoever
// scores them, so that they are used while they lie in L1.
#pragma once

#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/core/workspace.h"

namespace isthmus::kernels {

// Decoded copies that the queries of one sequence share; null where there are none.
struct SharedKeys {
  float* window = nullptr;   // Positions [window_begin, start_position) out of the ring.
  float* entries = nullptr;  // Entries [0, visible to the last row).
  int64_t window_begin = 0;
  int64_t num_entries = 0;
};

// A stored entry that is yet to be decoded; no entry where `data` is null.
struct StoredKey {
  const std::byte* data = nullptr;
  const std::byte* scale = nullptr;
  float* decoded = nullptr;  // [head_dim]
};

// The keys of one query, and the scratch of the thread that works on it.
struct QueryKeys {
  int64_t row = -1;              // The query that the rest belongs to; -1: none yet.
  int64_t count = 0;             // Keys; the list is padded with its last key to a multiple of 4.
  const float** keys = nullptr;  // [max_keys]
  StoredKey* stored = nullptr;   // [max_keys]; those among the keys that are yet to be decoded.
  bool is_decoded = false;       // Nothing of `stored` is left to do.
  float* decoded = nullptr;      // [max_keys][head_dim]
  uint64_t* marks = nullptr;     // One bit per visible entry, for sorting `selected`.
  float* scores = nullptr;       // [heads of a task][max_keys]
  int64_t max_keys = 0;          // A multiple of 16.
};

inline constexpr int64_t kKeysPerTile = 4;
inline constexpr int64_t kMaxTaskHeads = 8;  // Heads of one task.

// Plans and fills the shared copies of all sequences; the array lives in `scope`.
SharedKeys* DecodeSharedKeys(const AttentionArgs& args, const Exec& exec, Workspace::Scope& scope);

// One QueryKeys per thread, large enough for any query of `args`; `task_heads` heads at a time.
QueryKeys* TakeQueryKeys(const AttentionArgs& args, const SharedKeys* shared, int64_t task_heads,
                         const Exec& exec, Workspace::Scope& scope);

// Makes `out` the keys of `row` of `seq`, some of them stored ones that the caller decodes; nothing
// to do when it holds them already.
void CollectKeys(const AttentionArgs& args, const SequenceKv& seq, const SharedKeys& shared,
                 int64_t row, QueryKeys* out);

}  // namespace isthmus::kernels
