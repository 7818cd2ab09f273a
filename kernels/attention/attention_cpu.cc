// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of attention. One task is one query and up to kTaskHeads of its heads, so
// that every key vector loaded serves several heads; decode has enough tasks for all threads in a
// single row. The order of every sum is that of attention.h and depends on nothing else
// (kernels/decisions/0003-attention-in-one-pass.md).
//
// Letters: h head, k key, d channel.
#include <hwy/cache_control.h>

#include <algorithm>
#include <cstring>

#include "kernels/attention/attention_keys.h"
#include "kernels/attention/attention_variants.h"
#include "kernels/core/quantise.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/kv_entry-inl.h"
#include "kernels/core/simd-inl.h"
// clang-format on

#ifndef ISTHMUS_ATTENTION_HEAD_TASK_
#define ISTHMUS_ATTENTION_HEAD_TASK_
namespace isthmus::kernels {

// Some heads of one query.
struct HeadTask {
  const float* q = nullptr;            // [heads][head_dim]
  float* out = nullptr;                // [heads][head_dim]; may be q
  const float* sink = nullptr;         // [heads]
  const float* const* keys = nullptr;  // [num_keys], padded to a multiple of kKeysPerTile
  const StoredKey* stored = nullptr;   // [num_keys], padded too; null when all keys are decoded.
  int64_t num_keys = 0;
  int64_t heads = 0;
  int64_t head_dim = 0;  // A multiple of 16.
  int64_t rope_dim = 0;
  float scale = 0.0f;
  bool is_reference = false;
  float* scores = nullptr;  // Scratch [heads][scores_stride]
  int64_t scores_stride = 0;
};

}  // namespace isthmus::kernels
#endif  // ISTHMUS_ATTENTION_HEAD_TASK_

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

inline constexpr int kTileHeads = kParts == 1 ? 4 : 2;  // 16 sums fill AVX-512, 4 half of AVX2.
inline constexpr int kTileKeys = kParts == 1 ? 4 : 2;
static_assert(kKeysPerTile % kTileKeys == 0);

// Decodes those of keys [k, k + kTileKeys) that are stored.
HWY_INLINE void DecodeTile(const HeadTask& task, int64_t k) {
  for (int64_t j = k; j < k + kTileKeys; ++j) {
    const StoredKey& key = task.stored[j];
    if (key.data == nullptr) continue;
    DecodeKvEntryInline(
        reinterpret_cast<const uint8_t*>(key.data), reinterpret_cast<const uint8_t*>(key.scale),
        static_cast<int>(task.head_dim), static_cast<int>(task.rope_dim), key.decoded);
  }
}

// Asks for stored keys [begin, end): every sequence has a cache of its own, far away when its turn
// comes.
HWY_INLINE void PrefetchStored(const HeadTask& task, int64_t begin, int64_t end) {
  constexpr int64_t kLineBytes = 64;
  const int64_t bytes = task.head_dim + task.rope_dim;
  for (int64_t k = begin; k < std::min(end, task.num_keys); ++k) {
    const std::byte* data = task.stored[k].data;
    for (int64_t i = 0; data != nullptr && i < bytes; i += kLineBytes) hwy::Prefetch(data + i);
  }
}

// Scores of kHeads heads with kTileKeys keys.
template <int kHeads>
HWY_INLINE void ScoreTile(const HeadTask& task, int64_t h, int64_t k) {
  const float* q[kHeads];
  for (int i = 0; i < kHeads; ++i) q[i] = task.q + (h + i) * task.head_dim;
  float tile[kHeads * kTileKeys];
  DotTile16<kHeads, kTileKeys>(q, task.keys + k, static_cast<size_t>(task.head_dim), tile);
  for (int i = 0; i < kHeads; ++i) {
    float* scores = task.scores + (h + i) * task.scores_stride + k;
    for (int j = 0; j < kTileKeys; ++j) scores[j] = task.scale * tile[i * kTileKeys + j];
  }
}

// Scores of all heads with all keys. A tile of keys meets all heads while it lies in L1, and later
// ones are asked for bit by bit meanwhile.
HWY_INLINE void ScoreKeys(const HeadTask& task) {
  constexpr int64_t kAheadKeys = 8;
  if (task.stored != nullptr) PrefetchStored(task, 0, kAheadKeys);
  for (int64_t k = 0; k < task.num_keys; k += kTileKeys) {
    if (task.stored != nullptr) DecodeTile(task, k);
    int64_t asked = k + kAheadKeys;
    for (int64_t h = 0; h < task.heads;) {
      const int64_t next = std::min(h + kTileHeads, task.heads);
      if (task.stored != nullptr) {
        const int64_t end = k + kAheadKeys + kTileKeys * next / task.heads;
        PrefetchStored(task, asked, end);
        asked = end;
      }
      if (next - h == kTileHeads) {
        ScoreTile<kTileHeads>(task, h, k);
        h = next;
      }
      for (; h < next; ++h) ScoreTile<1>(task, h, k);
    }
  }
}

// Turns the scores of one head into numerators in place and returns the denominator.
HWY_INLINE float SoftmaxHead(const HeadTask& task, int64_t h) {
  const DF d;
  float* s = task.scores + h * task.scores_stride;
  // Scores beyond the last key are those of padding: no key at all.
  const int64_t padded = (task.num_keys + 15) / 16 * 16;
  const float lowest = -hn::GetLane(hn::Inf(d));
  for (int64_t k = task.num_keys; k < padded; ++k) s[k] = lowest;

  F32x16 max16 = Load16(s);
  for (int64_t k = 16; k < padded; k += 16) max16 = Max16(max16, Load16(s + k));
  VF max_v = max16.v[0];
  if constexpr (kParts == 2) max_v = hn::Max(max_v, max16.v[kParts - 1]);
  const float max = hn::GetLane(hn::MaxOfLanes(d, max_v));

  const F32x16 shift = Set16(max);
  F32x16 sum = Zero16();
  for (int64_t k = 0; k < padded; k += 16) {
    const F32x16 p = Exp16(Sub16(Load16(s + k), shift));
    sum = Add16(sum, p);
    Store16(task.is_reference ? RoundBf16x16(p) : p, s + k);
  }
  const VF sink = ExpV(hn::Set(d, task.sink[h] - max));
  return Fold16(sum) + hn::GetLane(sink);
}

// out = sum over keys of p * value, then the division, for kHeads heads and kVectors registers of
// channels from `d0`.
template <int kHeads, int kVectors>
HWY_INLINE void ValueTile(const HeadTask& task, const float* denominator, int64_t h, int64_t d0) {
  const DF d;
  VF sum[kHeads][kVectors];
  const float* p[kHeads];
#pragma GCC unroll 8
  for (int i = 0; i < kHeads; ++i) {
    p[i] = task.scores + (h + i) * task.scores_stride;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::Zero(d);
  }
  for (int64_t k = 0; k < task.num_keys; ++k) {
    const float* value = task.keys[k] + d0;
    VF x[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) x[v] = hn::LoadU(d, value + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kHeads; ++i) {
      const VF weight = hn::Set(d, p[i][k]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] = hn::MulAdd(weight, x[v], sum[i][v]);
    }
  }
  for (int i = 0; i < kHeads; ++i) {
    const VF divisor = hn::Set(d, denominator[h + i]);
    float* out = task.out + (h + i) * task.head_dim + d0;
    for (int v = 0; v < kVectors; ++v) {
      const VF o = hn::Div(sum[i][v], divisor);
      hn::StoreU(task.is_reference ? RoundBf16V(o) : o, d, out + v * kLanes);
    }
  }
}

template <int kHeads>
HWY_INLINE void ValueHeads(const HeadTask& task, const float* denominator, int64_t h) {
  constexpr int kVectors = kHeads == 8 ? 2 : 4;
  constexpr int64_t kStep = kVectors * static_cast<int64_t>(kLanes);
  int64_t d0 = 0;
  for (; d0 + kStep <= task.head_dim; d0 += kStep) {
    ValueTile<kHeads, kVectors>(task, denominator, h, d0);
  }
  for (; d0 < task.head_dim; d0 += static_cast<int64_t>(kLanes)) {
    ValueTile<kHeads, 1>(task, denominator, h, d0);
  }
}

void AttendHeads(const HeadTask& task) {
  ScoreKeys(task);
  float denominator[kMaxTaskHeads];
  for (int64_t h = 0; h < task.heads; ++h) denominator[h] = SoftmaxHead(task, h);
  int64_t h = 0;
  if constexpr (kParts == 1) {  // Eight heads read a value once.
    for (; h + 8 <= task.heads; h += 8) ValueHeads<8>(task, denominator, h);
  }
  for (; h + kTileHeads <= task.heads; h += kTileHeads) {
    ValueHeads<kTileHeads>(task, denominator, h);
  }
  for (; h < task.heads; ++h) ValueHeads<1>(task, denominator, h);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
namespace {

HWY_EXPORT(AttendHeads);

// Puts rows [begin, end) of a sequence's chunk into its ring.
void CommitRows(const AttentionArgs& args, const SequenceKv& seq, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t slot = (seq.start_position + i) % args.window;
    const float* row = args.chunk_kv.f32(seq.first_row + i);
    std::byte* data = args.window_plane.data(seq.state, slot);
    if (args.window_plane.format == EntryFormat::kKvF32) {
      std::memcpy(data, row, sizeof(float) * static_cast<size_t>(args.head_dim));
    } else {
      EncodeKvEntry(row, static_cast<int>(args.head_dim), static_cast<int>(args.rope_dim), data,
                    args.window_plane.scale(seq.state, slot));
    }
  }
}

// The chunk's last rows go into the ring: a later chunk reads them from there.
void CommitWindow(const AttentionArgs& args, const Exec& exec) {
  const auto first_row = [&](const SequenceKv& seq) {
    return seq.num_rows - std::min(seq.num_rows, args.window);
  };
  const auto num_sequences = static_cast<int64_t>(args.sequences.size());
  if (2 * num_sequences > args.q.rows) {  // Few rows of each, as in decode.
    ParallelFor(exec, num_sequences, 8, [&](int64_t begin, int64_t end, int) {
      for (const SequenceKv& seq :
           args.sequences.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))) {
        CommitRows(args, seq, first_row(seq), seq.num_rows);
      }
    });
    return;
  }
  for (const SequenceKv& seq : args.sequences) {
    const int64_t first = first_row(seq);
    ParallelFor(exec, seq.num_rows - first, 16, [&](int64_t begin, int64_t end, int) {
      CommitRows(args, seq, first + begin, first + end);
    });
  }
}

}  // namespace

absl::Status LaunchAttentionCpu(const AttentionArgs& args, const Exec& exec) {
  const int64_t rows = args.q.rows;
  if (rows == 0) return absl::OkStatus();
  Workspace::Scope scope(exec.workspace);
  const int64_t groups = (args.num_heads + kMaxTaskHeads - 1) / kMaxTaskHeads;
  const SharedKeys* shared = DecodeSharedKeys(args, exec, scope);
  QueryKeys* thread_keys = TakeQueryKeys(args, shared, kMaxTaskHeads, exec, scope);
  auto* row_sequence = scope.Take<int32_t>(rows);
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    const SequenceKv& seq = args.sequences[i];
    std::fill_n(row_sequence + seq.first_row, seq.num_rows, static_cast<int32_t>(i));
  }

  // With many rows a thread takes all heads of a query, so that its keys are collected once.
  const int64_t grain = rows >= int64_t{4} * NumThreads(exec) ? groups : 1;
  ParallelFor(exec, rows * groups, grain, [&](int64_t begin, int64_t end, int thread) {
    QueryKeys& keys = thread_keys[thread];
    for (int64_t task_index = begin; task_index < end; ++task_index) {
      const int64_t row = task_index / groups;
      const int64_t h = task_index % groups * kMaxTaskHeads;
      const auto i = static_cast<size_t>(row_sequence[row]);
      CollectKeys(args, args.sequences[i], shared[i], row, &keys);
      const HeadTask task = {.q = args.q.f32(row) + h * args.head_dim,
                             .out = args.out.f32(row) + h * args.head_dim,
                             .sink = args.sink.f32() + h,
                             .keys = keys.keys,
                             .stored = keys.is_decoded ? nullptr : keys.stored,
                             .num_keys = keys.count,
                             .heads = std::min<int64_t>(kMaxTaskHeads, args.num_heads - h),
                             .head_dim = args.head_dim,
                             .rope_dim = args.rope_dim,
                             .scale = args.scale,
                             .is_reference = args.arithmetic == Arithmetic::kReference,
                             .scores = keys.scores,
                             .scores_stride = keys.max_keys};
      HWY_DYNAMIC_DISPATCH(AttendHeads)(task);
      keys.is_decoded = true;
    }
  });
  CommitWindow(args, exec);
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
