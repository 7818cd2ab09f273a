// SPDX-License-Identifier: Apache-2.0
// Keys of a query: sharing, decoding and order.
#include "kernels/attention/attention_keys.h"

#include <algorithm>
#include <bit>
#include <new>

#include "kernels/attention/attention_variants.h"
#include "kernels/core/quantise.h"
#include "kernels/core/scratch_count.h"

namespace isthmus::kernels {
namespace {

// A decoded window costs one row of queries' worth of decoding, so a few rows repay it.
constexpr int64_t kMinRowsToShare = 4;
// Shared copies of entries of one call; beyond it each query decodes what it selects.
constexpr int64_t kMaxSharedBytes = int64_t{64} << 20;

int64_t KeysPerQuery(const AttentionArgs& args, const SequenceKv& seq) {
  const int64_t end = seq.start_position + seq.num_rows;
  const int64_t visible = VisibleEntries(end - 1, args.ratio);
  const int64_t entries = args.selected != nullptr ? std::min(args.max_selected, visible) : visible;
  return std::min(end, args.window) + entries;
}

// How many decoded entries the queries of `seq` would ask for one by one.
int64_t EntryUses(const AttentionArgs& args, const SequenceKv& seq, int64_t visible) {
  return seq.num_rows * (args.selected != nullptr ? std::min(args.max_selected, visible) : visible);
}

void DecodeEntry(const AttentionArgs& args, const std::byte* data, const std::byte* scale,
                 float* out) {
  DecodeKvEntry(data, scale, static_cast<int>(args.head_dim), static_cast<int>(args.rope_dim), out);
}

bool IsF32(const EntryPlane& plane) { return plane.format == EntryFormat::kKvF32; }

}  // namespace

SharedKeys* DecodeSharedKeys(const AttentionArgs& args, const Exec& exec, Workspace::Scope& scope) {
  auto* shared = scope.Take<SharedKeys>(static_cast<int64_t>(args.sequences.size()));
  const int64_t d = args.head_dim;
  int64_t budget = kMaxSharedBytes / static_cast<int64_t>(sizeof(float));
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    const SequenceKv& seq = args.sequences[i];
    SharedKeys& keys = *new (&shared[i]) SharedKeys;
    if (seq.num_rows < kMinRowsToShare) continue;
    if (!IsF32(args.window_plane)) {
      keys.window_begin = std::max<int64_t>(0, seq.start_position - args.window + 1);
      const int64_t count = seq.start_position - keys.window_begin;
      keys.window = scope.Take<float>(std::max<int64_t>(1, count * d));
      ParallelFor(exec, count, 8, [&](int64_t begin, int64_t end, int) {
        for (int64_t k = begin; k < end; ++k) {
          const int64_t slot = (keys.window_begin + k) % args.window;
          DecodeEntry(args, args.window_plane.data(seq.state, slot),
                      args.window_plane.scale(seq.state, slot), keys.window + k * d);
        }
      });
    }
    if (args.ratio == 0 || IsF32(args.entry_plane)) continue;
    const int64_t visible = VisibleEntries(seq.start_position + seq.num_rows - 1, args.ratio);
    if (visible == 0 || visible * d > budget || EntryUses(args, seq, visible) < 2 * visible) {
      continue;
    }
    budget -= visible * d;
    keys.num_entries = visible;
    keys.entries = scope.Take<float>(visible * d);
    const PagedEntries paged = {seq.pages[args.entry_kind], args.entry_plane};
    ParallelFor(exec, visible, 8, [&](int64_t begin, int64_t end, int) {
      for (int64_t j = begin; j < end; ++j) {
        DecodeEntry(args, paged.data(j), paged.scale(j), keys.entries + j * d);
      }
    });
  }
  return shared;
}

QueryKeys* TakeQueryKeys(const AttentionArgs& args, const SharedKeys* shared, int64_t task_heads,
                         const Exec& exec, Workspace::Scope& scope) {
  int64_t max_keys = 0;
  int64_t max_decoded = 0;
  int64_t max_visible = 0;
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    const SequenceKv& seq = args.sequences[i];
    if (seq.num_rows == 0) continue;
    const int64_t keys = KeysPerQuery(args, seq);
    max_keys = std::max(max_keys, keys);
    const bool window_ready = IsF32(args.window_plane) || shared[i].window != nullptr;
    const bool entries_ready =
        args.ratio == 0 || IsF32(args.entry_plane) || shared[i].entries != nullptr;
    if (!window_ready || !entries_ready) max_decoded = std::max(max_decoded, keys);
    max_visible =
        std::max(max_visible, VisibleEntries(seq.start_position + seq.num_rows - 1, args.ratio));
  }
  max_keys = (max_keys + 15) / 16 * 16;
  auto* out = scope.Take<QueryKeys>(NumThreads(exec));
  for (int t = 0; t < NumThreads(exec); ++t) {
    QueryKeys& keys = *new (&out[t]) QueryKeys;
    keys.max_keys = max_keys;
    keys.keys = scope.Take<const float*>(max_keys);
    keys.stored = scope.Take<StoredKey>(max_keys);
    if (max_decoded > 0) keys.decoded = scope.Take<float>(max_decoded * args.head_dim);
    if (args.selected != nullptr) keys.marks = scope.Take<uint64_t>(max_visible / 64 + 1);
    keys.scores = scope.Take<float>(task_heads * max_keys);
  }
  return out;
}

int64_t AttentionScratchBytes(const AttentionSize& s, int threads) {
  const int64_t visible = VisibleEntries(s.max_tokens - 1, s.ratio);
  const int64_t used = s.ratio == 4 ? std::min(s.max_selected, visible) : visible;
  const int64_t keys = std::min(s.max_tokens, s.window) + used;
  const int64_t max_keys = (keys + 15) / 16 * 16;
  const int64_t sharing = s.stores_f32 ? 0 : std::min(s.sequences, s.rows / kMinRowsToShare);
  // What is shared was asked for at least twice: as many entries as half the queries select.
  const int64_t budget = kMaxSharedBytes / static_cast<int64_t>(sizeof(float)) / s.head_dim;
  const int64_t shared = std::min({sharing * visible, s.rows * used / 2, budget});
  const auto of_threads = [&](bool decodes) {
    ScratchCount scratch;
    for (int t = 0; t < threads; ++t) {
      scratch.Take<const float*>(max_keys);
      scratch.Take<StoredKey>(max_keys);
      if (decodes && !s.stores_f32) scratch.Take<float>(keys * s.head_dim);
      if (s.ratio == 4 && visible > 0) scratch.Take<uint64_t>(visible / 64 + 1);
      scratch.Take<float>(kMaxTaskHeads * max_keys);
    }
    return scratch.peak_bytes();
  };
  const auto count = [&](int64_t sequences, int64_t entries, bool decodes) {
    ScratchCount scratch;
    scratch.Take<SharedKeys>(s.sequences);
    for (int64_t i = 0; i < sequences; ++i) scratch.Take<float>((s.window - 1) * s.head_dim);
    if (entries > 0) scratch.Take<float>(entries * s.head_dim);
    scratch.Take<QueryKeys>(threads);
    scratch.Lend(of_threads(decodes) + Workspace::RoundedBytes(4 * s.rows));
    return scratch.peak_bytes();
  };
  // One sequence either shares its entries or has them decoded query by query; among several some
  // may do the one, some the other.
  if (s.sequences > 1) return count(sharing, shared, true);
  const bool shares_windows_alone = s.ratio != 0;
  return std::max({count(sharing, shared, false), count(0, 0, true),
                   shares_windows_alone ? count(sharing, 0, true) : 0});
}

namespace {

void AppendReady(const float* key, QueryKeys* out) {
  out->stored[out->count] = StoredKey{};
  out->keys[out->count++] = key;
}

void AppendStored(const AttentionArgs& args, const std::byte* data, const std::byte* scale,
                  QueryKeys* out) {
  float* decoded = out->decoded + out->count * args.head_dim;
  out->stored[out->count] = {data, scale, decoded};
  out->keys[out->count++] = decoded;
}

void AppendEntry(const AttentionArgs& args, const PagedEntries& paged, const SharedKeys& shared,
                 int64_t j, QueryKeys* out) {
  if (IsF32(args.entry_plane)) {
    AppendReady(reinterpret_cast<const float*>(paged.data(j)), out);
  } else if (shared.entries != nullptr) {
    AppendReady(shared.entries + j * args.head_dim, out);
  } else {
    AppendStored(args, paged.data(j), paged.scale(j), out);
  }
}

void AppendWindow(const AttentionArgs& args, const SequenceKv& seq, const SharedKeys& shared,
                  int64_t position, QueryKeys* out) {
  const EntryPlane& plane = args.window_plane;
  for (int64_t p = std::max<int64_t>(0, position - args.window + 1); p <= position; ++p) {
    const int64_t slot = p % args.window;
    if (p >= seq.start_position) {
      AppendReady(args.chunk_kv.f32(seq.first_row + p - seq.start_position), out);
    } else if (IsF32(plane)) {
      AppendReady(reinterpret_cast<const float*>(plane.data(seq.state, slot)), out);
    } else if (shared.window != nullptr) {
      AppendReady(shared.window + (p - shared.window_begin) * args.head_dim, out);
    } else {
      AppendStored(args, plane.data(seq.state, slot), plane.scale(seq.state, slot), out);
    }
  }
}

// Selected entries in ascending order, by marking them: cheaper than sorting, and the order of the
// indexer's list then cannot reach the bits of the result.
void AppendSelected(const AttentionArgs& args, const PagedEntries& paged, const SharedKeys& shared,
                    int64_t row, int64_t visible, QueryKeys* out) {
  const int64_t words = visible / 64 + 1;
  std::fill(out->marks, out->marks + words, uint64_t{0});
  const int32_t* selected = args.selected + row * args.max_selected;
  for (int64_t k = 0; k < args.max_selected; ++k) {
    if (selected[k] >= 0) out->marks[selected[k] / 64] |= uint64_t{1} << (selected[k] % 64);
  }
  for (int64_t w = 0; w < words; ++w) {
    for (uint64_t bits = out->marks[w]; bits != 0; bits &= bits - 1) {
      AppendEntry(args, paged, shared, 64 * w + std::countr_zero(bits), out);
    }
  }
}

}  // namespace

void CollectKeys(const AttentionArgs& args, const SequenceKv& seq, const SharedKeys& shared,
                 int64_t row, QueryKeys* out) {
  if (out->row == row) return;
  out->row = row;
  out->count = 0;
  out->is_decoded = false;
  const int64_t position = seq.start_position + row - seq.first_row;
  AppendWindow(args, seq, shared, position, out);
  if (args.ratio != 0) {
    const int64_t visible = VisibleEntries(position, args.ratio);
    const PagedEntries paged = {seq.pages[args.entry_kind], args.entry_plane};
    if (args.selected != nullptr) {
      AppendSelected(args, paged, shared, row, visible, out);
    } else {
      for (int64_t j = 0; j < visible; ++j) AppendEntry(args, paged, shared, j, out);
    }
  }
  for (int64_t k = out->count; k % kKeysPerTile != 0; ++k) {
    out->keys[k] = out->keys[out->count - 1];
    out->stored[k] = StoredKey{};
  }
}

}  // namespace isthmus::kernels
