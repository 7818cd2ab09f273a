// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of the indexer. Work is cut into items of up to kRowsPerItem rows of one
// sequence, and items into tasks of kKeysPerBlock keys. A task decodes its keys once, transposed,
// so that a register holds one channel of sixteen keys, and scores all rows of the item with them:
// a small matrix product per head, in the order of sums of indexer.h. Selection follows, row by
// row.
//
// Letters: h head, d channel, j key.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/core/hadamard.h"
#include "kernels/core/index_key.h"
#include "kernels/core/quantise.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/indexer/indexer_variants.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/indexer_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/simd-inl.h"
// clang-format on

#ifndef ISTHMUS_INDEXER_SCORE_TASK_
#define ISTHMUS_INDEXER_SCORE_TASK_
namespace isthmus::kernels {

inline constexpr int64_t kKeysPerBlock = 64;

// One row with one block of keys.
struct ScoreTask {
  const float* q = nullptr;     // [num_heads][dim]
  const float* w = nullptr;     // [num_heads]
  const float* keys = nullptr;  // [dim][kKeysPerBlock]
  int64_t num_keys = 0;         // Of the block; beyond it scores are of no use.
  int64_t num_heads = 0;
  int64_t dim = 0;
  bool is_reference = false;
  float* scores = nullptr;  // [kKeysPerBlock]
};

// Up to sixteen stored fp4 keys.
struct StoredKeys {
  int64_t count = 0;
  const uint8_t* data[16];   // [dim / 2]
  const uint8_t* scale[16];  // [dim / kIndexKeyBlock]
};

}  // namespace isthmus::kernels
#endif  // ISTHMUS_INDEXER_SCORE_TASK_

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

// Adds kHeads heads, from `h`, to the scores of kVectors registers of keys from `j`.
template <int kHeads, int kVectors>
HWY_INLINE void ScoreTile(const ScoreTask& task, int64_t h, int64_t j) {
  const DF d;
  const VF zero = hn::Zero(d);
  VF dot[kHeads][kVectors];
  const float* q = task.q + h * task.dim;
#pragma GCC unroll 8
  for (int i = 0; i < kHeads; ++i) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) dot[i][v] = zero;
  }
  const float* keys = task.keys + j;
  for (int64_t c = 0; c < task.dim; ++c, keys += kKeysPerBlock) {
    VF key[kVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) key[v] = hn::LoadU(d, keys + v * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kHeads; ++i) {
      const VF x = hn::Set(d, q[i * task.dim + c]);
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) dot[i][v] = hn::MulAdd(x, key[v], dot[i][v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    float* out = task.scores + j + v * kLanes;
    VF score = h == 0 ? zero : hn::LoadU(d, out);
#pragma GCC unroll 8
    for (int i = 0; i < kHeads; ++i) {
      const VF w = hn::Set(d, task.w[h + i]);
      VF x = task.is_reference ? RoundBf16V(dot[i][v]) : dot[i][v];
      x = hn::Mul(hn::IfThenZeroElse(hn::Lt(x, zero), x), w);  // A NaN stays one.
      score = hn::Add(score, task.is_reference ? RoundBf16V(x) : x);
    }
    hn::StoreU(score, d, out);
  }
}

// Scores of kVectors registers of keys from `j`.
template <int kVectors>
HWY_INLINE void ScoreHeads(const ScoreTask& task, int64_t j) {
  constexpr int kHeads = kParts == 1 ? 4 : 2;  // 16 sums fill AVX-512's registers; AVX2 has half.
  int64_t h = 0;
  for (; h + kHeads <= task.num_heads; h += kHeads) ScoreTile<kHeads, kVectors>(task, h, j);
  for (; h < task.num_heads; ++h) ScoreTile<1, kVectors>(task, h, j);
}

void ScoreBlock(const ScoreTask& task) {
  constexpr auto kStep = static_cast<int64_t>(kLanes);
  int64_t j = 0;
  for (; j + 3 * kStep < task.num_keys; j += 4 * kStep) ScoreHeads<4>(task, j);
  for (; j + kStep < task.num_keys; j += 2 * kStep) ScoreHeads<2>(task, j);
  for (; j < task.num_keys; j += kStep) ScoreHeads<1>(task, j);
  if (!task.is_reference) return;
  MapRow16([](VF x) HWY_ATTR { return RoundBf16V(x); }, task.scores,
           static_cast<size_t>(task.num_keys), task.scores);
}

// The transpose of sixteen rows of sixteen bytes, in place. Each round turns the eight bits of a
// byte's address, row and then column, by one.
HWY_INLINE void TransposeBytes(uint8_t (&bytes)[16][16]) {
  const hn::FixedTag<uint8_t, 16> d;
  using V = hn::Vec<decltype(d)>;
  V rows[16];
  V turned[16];
  ISTHMUS_UNROLL
  for (int i = 0; i < 16; ++i) rows[i] = hn::Load(d, bytes[i]);
  ISTHMUS_UNROLL
  for (int round = 0; round < 4; ++round) {
    ISTHMUS_UNROLL
    for (size_t i = 0; i < 8; ++i) {
      turned[2 * i] = hn::InterleaveLower(d, rows[i], rows[i + 8]);
      turned[2 * i + 1] = hn::InterleaveUpper(d, rows[i], rows[i + 8]);
    }
    ISTHMUS_UNROLL
    for (int i = 0; i < 16; ++i) rows[i] = turned[i];
  }
  ISTHMUS_UNROLL
  for (int i = 0; i < 16; ++i) hn::Store(rows[i], d, bytes[i]);
}

// Stored fp4 keys as sixteen columns of out[channel][kKeysPerBlock], with the bits of
// DecodeIndexKey; columns beyond the last key are zero.
void DecodeKeyColumns(const StoredKeys& keys, int64_t dim, float* out) {
  alignas(16) uint8_t bytes[16][16];
  uint8_t scales[16] = {};
  for (int64_t block = 0; block < dim / kIndexKeyBlock; ++block) {
    for (int64_t j = 0; j < keys.count; ++j) {
      std::memcpy(bytes[j], keys.data[j] + block * 16, 16);
      scales[j] = keys.scale[j][block];
    }
    for (int64_t j = keys.count; j < 16; ++j) std::memset(bytes[j], 0, 16);
    TransposeBytes(bytes);
    const F32x16 factor = DecodeUe8m0x16(scales);
    float* column = out + block * kIndexKeyBlock * kKeysPerBlock;
    for (int i = 0; i < 16; ++i, column += 2 * kKeysPerBlock) {
      F32x16 even;
      F32x16 odd;
      DecodeE2m1Pairs16(bytes[i], &even, &odd);
      Store16(Mul16(even, factor), column);
      Store16(Mul16(odd, factor), column + kKeysPerBlock);
    }
  }
}

// The butterflies of strides below a register's width, then the rest between registers.
void HadamardT(float* x, int64_t n) {
  const DF d;
  const hn::Repartition<double, DF> pairs;
  const int64_t lanes = kLanes;
  for (int64_t k = 0; k < n; k += lanes) {
    VF v = hn::LoadU(d, x + k);
    VF s = hn::Reverse2(d, v);
    v = hn::OddEven(hn::Sub(s, v), hn::Add(v, s));
    s = hn::Shuffle1032(v);
    v = hn::BitCast(
        d, hn::OddEven(hn::BitCast(pairs, hn::Sub(s, v)), hn::BitCast(pairs, hn::Add(v, s))));
    s = hn::SwapAdjacentBlocks(v);
    v = hn::OddEvenBlocks(hn::Sub(s, v), hn::Add(v, s));
    if constexpr (kLanes == 16) {
      s = hn::ConcatLowerUpper(d, v, v);
      v = hn::ConcatUpperLower(d, hn::Sub(s, v), hn::Add(v, s));
    }
    hn::StoreU(v, d, x + k);
  }
  for (int64_t stride = lanes; stride < n; stride *= 2) {
    for (int64_t i = 0; i < n; i += 2 * stride) {
      for (int64_t j = i; j < i + stride; j += lanes) {
        const VF a = hn::LoadU(d, x + j);
        const VF b = hn::LoadU(d, x + j + stride);
        hn::StoreU(hn::Add(a, b), d, x + j);
        hn::StoreU(hn::Sub(a, b), d, x + j + stride);
      }
    }
  }
  const VF factor = hn::Set(d, 1.0f / std::sqrt(static_cast<float>(n)));
  for (int64_t k = 0; k < n; k += lanes) hn::StoreU(hn::Mul(hn::LoadU(d, x + k), factor), d, x + k);
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
namespace {

HWY_EXPORT(ScoreBlock);
HWY_EXPORT(DecodeKeyColumns);
HWY_EXPORT(HadamardT);

constexpr int64_t kRowsPerItem = 64;
constexpr int64_t kMaxScoreFloats = int64_t{8} << 20;  // Of the rows in work, if more than one.

// Up to kRowsPerItem rows of one sequence.
struct Item {
  const SequenceKv* sequence = nullptr;
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t num_keys = 0;        // Visible to the last row; 0 when no row needs scores.
  int64_t stride = 0;          // Of its scores, num_keys rounded up to whole blocks.
  int64_t offset = 0;          // Of its scores in the buffer.
  int64_t first_task = 0;      // Tasks of earlier items in the same pass.
  int64_t first_item_row = 0;  // Rows of earlier items in the same pass.

  int64_t visible(int64_t row) const {
    return VisibleKeys(sequence->start_position + row - sequence->first_row);
  }
};

bool NeedsScores(const IndexerArgs& args, int64_t visible) {
  return visible > 0 && (args.scores != nullptr || visible > args.topk);
}

// All items of the batch, in order of rows; returns their number. Null `out` only counts.
int64_t MakeItems(const IndexerArgs& args, Item* out) {
  int64_t count = 0;
  for (const SequenceKv& seq : args.sequences) {
    int64_t row = seq.first_row;
    const int64_t end = seq.first_row + seq.num_rows;
    while (row < end) {
      const int64_t last_visible = VisibleKeys(seq.start_position + end - 1 - seq.first_row);
      const int64_t fits = std::max<int64_t>(1, kMaxScoreFloats / (last_visible + kKeysPerBlock));
      const int64_t rows = std::min({end - row, kRowsPerItem, fits});
      if (out != nullptr) {
        Item& item = out[count];
        item = Item{.sequence = &seq, .first_row = row, .num_rows = rows};
        const int64_t visible = item.visible(row + rows - 1);
        if (NeedsScores(args, visible)) item.num_keys = visible;
        item.stride = (item.num_keys + kKeysPerBlock - 1) / kKeysPerBlock * kKeysPerBlock;
      }
      ++count;
      row += rows;
    }
  }
  return count;
}

// Lays out items [begin, end) of one pass, as many as the buffer takes; returns `end`.
int64_t PlanPass(Item* items, int64_t begin, int64_t count) {
  int64_t floats = 0;
  int64_t tasks = 0;
  int64_t rows = 0;
  int64_t i = begin;
  for (; i < count; ++i) {
    const int64_t more = items[i].num_rows * items[i].stride;
    if (i > begin && floats + more > kMaxScoreFloats) break;
    items[i].offset = floats;
    items[i].first_task = tasks;
    items[i].first_item_row = rows;
    floats += more;
    tasks += items[i].stride / kKeysPerBlock;
    rows += items[i].num_rows;
  }
  return i;
}

// The item that a task or a row of the pass belongs to.
template <typename Field>
const Item& FindItem(const Item* begin, const Item* end, int64_t index, Field first) {
  const Item* after = std::upper_bound(
      begin, end, index, [&](int64_t value, const Item& item) { return value < item.*first; });
  return *(after - 1);
}

// Decodes fp4 keys [first, first + count) into columns, and zeros up to a multiple of sixteen.
void TransposeFp4Keys(const PagedEntries& paged, int64_t first, int64_t count, int64_t dim,
                      float* keys) {
  for (int64_t begin = 0; begin < count; begin += 16) {
    StoredKeys stored;
    stored.count = std::min<int64_t>(count - begin, 16);
    for (int64_t j = 0; j < stored.count; ++j) {
      const int64_t key = first + begin + j;
      stored.data[j] = reinterpret_cast<const uint8_t*>(paged.data(key));
      stored.scale[j] = reinterpret_cast<const uint8_t*>(paged.scale(key));
    }
    HWY_DYNAMIC_DISPATCH(DecodeKeyColumns)(stored, dim, keys + begin);
  }
}

// Decodes keys [first, first + kKeysPerBlock) into columns. Those beyond `num_keys` are zero up to
// a multiple of sixteen, which is what is read.
void TransposeKeys(const IndexerArgs& args, const SequenceKv& seq, int64_t first, int64_t num_keys,
                   float* row, float* keys) {
  const PagedEntries paged = {seq.pages[kIndexKey], args.key_plane};
  const int64_t count = std::min(kKeysPerBlock, num_keys - first);
  if (args.key_plane.format == EntryFormat::kKeyFp4) {
    return TransposeFp4Keys(paged, first, count, args.dim, keys);
  }
  for (int64_t j = 0; j < count; ++j) {
    const float* key = row;
    if (args.key_plane.format == EntryFormat::kKeyF32) {
      key = reinterpret_cast<const float*>(paged.data(first + j));
    } else {
      for (int64_t d = 0; d < args.dim; ++d) {
        row[d] =
            IndexKeyValue(args.key_plane.format, paged.data(first + j), paged.scale(first + j), d);
      }
    }
    for (int64_t d = 0; d < args.dim; ++d) keys[d * kKeysPerBlock + j] = key[d];
  }
  for (int64_t j = count; j % 16 != 0; ++j) {
    for (int64_t d = 0; d < args.dim; ++d) keys[d * kKeysPerBlock + j] = 0.0f;
  }
}

void ScoreItem(const IndexerArgs& args, const Item& item, int64_t block, float* row_scratch,
               float* keys, float* scores) {
  const int64_t first = block * kKeysPerBlock;
  TransposeKeys(args, *item.sequence, first, item.num_keys, row_scratch, keys);
  for (int64_t i = 0; i < item.num_rows; ++i) {
    const int64_t row = item.first_row + i;
    const int64_t visible = item.visible(row);
    if (visible <= first || !NeedsScores(args, visible)) continue;
    const ScoreTask task = {.q = args.q.f32(row),
                            .w = args.w.f32(row),
                            .keys = keys,
                            .num_keys = std::min(kKeysPerBlock, visible - first),
                            .num_heads = args.num_heads,
                            .dim = args.dim,
                            .is_reference = args.arithmetic == Arithmetic::kReference,
                            .scores = scores + item.offset + i * item.stride + first};
    HWY_DYNAMIC_DISPATCH(ScoreBlock)(task);
  }
}

void SelectRow(const IndexerArgs& args, const Item& item, int64_t row, const float* scores,
               uint64_t* keys) {
  const int64_t visible = item.visible(row);
  int32_t* selected = args.selected + row * args.topk;
  if (NeedsScores(args, visible)) {
    SelectTopK(scores, visible, args.topk, keys, selected);
  } else {
    for (int64_t k = 0; k < args.topk; ++k) {
      selected[k] = k < visible ? static_cast<int32_t>(k) : -1;
    }
  }
  if (args.scores == nullptr) return;
  float* out = args.scores + row * args.scores_stride;
  std::copy(scores, scores + visible, out);
  std::fill(out + visible, out + args.scores_stride, -std::numeric_limits<float>::infinity());
}

}  // namespace

absl::Status LaunchIndexerCpu(const IndexerArgs& args, const Exec& exec) {
  if (args.q.rows == 0) return absl::OkStatus();
  Workspace::Scope scope(exec.workspace);
  const int64_t count = MakeItems(args, nullptr);
  auto* items = scope.Take<Item>(count);
  MakeItems(args, items);
  int64_t max_keys = 1;
  int64_t max_floats = 1;
  for (int64_t begin = 0; begin < count;) {
    const int64_t end = PlanPass(items, begin, count);
    const Item& last = items[end - 1];
    max_floats = std::max(max_floats, last.offset + last.num_rows * last.stride);
    for (int64_t i = begin; i < end; ++i) max_keys = std::max(max_keys, items[i].num_keys);
    begin = end;
  }
  const int threads = NumThreads(exec);
  const int64_t block_floats = args.dim * kKeysPerBlock;
  auto* scores = scope.Take<float>(max_floats);
  auto* blocks = scope.Take<float>(threads * (block_floats + args.dim));
  auto* sort_keys = scope.Take<uint64_t>(threads * max_keys);

  for (int64_t first = 0; first < count;) {
    const int64_t next = PlanPass(items, first, count);
    const Item* begin = items + first;
    const Item* end = items + next;
    const Item& last = items[next - 1];
    const int64_t tasks = last.first_task + last.stride / kKeysPerBlock;
    ParallelFor(exec, tasks, 1, [&](int64_t task, int64_t stop, int thread) {
      float* keys = blocks + thread * (block_floats + args.dim);
      for (; task < stop; ++task) {
        const Item& item = FindItem(begin, end, task, &Item::first_task);
        ScoreItem(args, item, task - item.first_task, keys + block_floats, keys, scores);
      }
    });
    ParallelFor(
        exec, last.first_item_row + last.num_rows, 1, [&](int64_t row, int64_t stop, int thread) {
          for (; row < stop; ++row) {
            const Item& item = FindItem(begin, end, row, &Item::first_item_row);
            const int64_t i = row - item.first_item_row;
            SelectRow(args, item, item.first_row + i, scores + item.offset + i * item.stride,
                      sort_keys + thread * max_keys);
          }
        });
    first = next;
  }
  return absl::OkStatus();
}

int64_t IndexerScratchBytes(const IndexerSize& size, int threads) {
  const bool scores = size.max_keys > size.topk;  // Else whoever sees keys selects them all.
  const int64_t stride = (size.max_keys + kKeysPerBlock - 1) / kKeysPerBlock * kKeysPerBlock;
  const int64_t fits = std::max<int64_t>(1, kMaxScoreFloats / (size.max_keys + kKeysPerBlock));
  const int64_t item_rows = std::min(kRowsPerItem, fits);
  ScratchCount scratch;
  // Every sequence may end in an item that is not full.
  scratch.Take<Item>(
      std::min(size.rows, (size.rows + size.sequences * (item_rows - 1)) / item_rows));
  scratch.Take<float>(scores ? std::min(size.rows * stride, std::max(kMaxScoreFloats, stride)) : 1);
  scratch.Take<float>(threads * (size.dim * kKeysPerBlock + size.dim));
  scratch.Take<uint64_t>(threads * (scores ? size.max_keys : 1));
  return scratch.peak_bytes();
}

void Hadamard(float* x, int64_t n) {
  if (n % 16 == 0) {
    HWY_DYNAMIC_DISPATCH(HadamardT)(x, n);
    return;
  }
  HadamardButterflies(x, n);
  const float factor = 1.0f / std::sqrt(static_cast<float>(n));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
