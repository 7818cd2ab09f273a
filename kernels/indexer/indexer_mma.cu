// SPDX-License-Identifier: Apache-2.0
// Scores of the indexer on tensor cores. Patch indexer.mma_scores. A warp holds 32 keys (16 bf16
// keys, or where there are few) in registers and streams the heads of up to three rows past them;
// each dot product is one accumulator, so that all three roundings of reference arithmetic stand
// where they should. Products of fp4 and fp8 values are exact; sums over heads are not in the
// order of the CPU path.
//
// Patch indexer.fused_select: the block that finishes a row's last tile selects, too, and short
// rows are listed on the way, so that a decode step has one launch fewer.
//
// Bound by memory in decode: 68 (fp4), 132 (fp8) or 256 (bf16) bytes a key, once; by mma.sync in
// prefill and, with fp4 keys, from a few rows on: 2 * heads * 128 operations a row and key.
#include <algorithm>

#include "kernels/indexer/indexer_passes.h"
#include "kernels/indexer/indexer_rows.cuh"
#include "kernels/indexer/mma_keys.cuh"
#include "kernels/indexer/radix_select.cuh"

namespace isthmus::kernels {
namespace mma_scores {

constexpr int kHeadTiles = 4;
constexpr int kHeads = 16 * kHeadTiles;  // At most.
constexpr int kHeldRanks = 16;           // Of a row, in registers of a thread that selects.

// How a kernel is cut.
template <EntryFormat kFormatOf, int kTilesOf, bool kSelectsOf>
struct Cut {
  static constexpr EntryFormat kFormat = kFormatOf;
  static constexpr int kTiles = kTilesOf;  // Of 8 keys, of a warp.
  static constexpr int kKeys = 8 * kTiles;
  static constexpr bool kSelects = kSelectsOf;
  // Selecting takes registers, which twelve warps leave.
  static constexpr int kWarps = kSelects ? 12 : 16;
  static constexpr int kThreads = kWarps * kWarpLanes;
  // Rows whose queries lie in shared memory together: what the keys leave.
  static constexpr int kSlots = kFormat == EntryFormat::kKeyFp4 || kSelects ? 3 : 2;
};

// Consecutive rows of one sequence and a range of tiles of its keys.
struct Run {
  int first_row;  // Of the pass.
  int rows;
  int slot;  // Of the first row.
  int first_tile;
  int first_item;  // Tiles of earlier runs of the batch.
};

template <typename C>
struct Shared {
  uint4 q[C::kSlots][kHeadTiles][kSteps][kWarpLanes];  // A operands; lane ^ (s & 4)
  float w[C::kSlots][kHeads];                          // Times the power of two of the head.
  alignas(
      16) unsigned char keys[C::kWarps][C::kKeys * kKeyBytes<C::kFormat>];  // Of one tile per warp
  uint32_t scales[C::kWarps][C::kKeys];
  Run runs[C::kSlots];
  int num_runs;
  int num_slots;
  int num_items;
  int left;      // Tiles of the block's share that no batch had yet,
  int next_row;  // and where they begin.
  int next_tile;
  bool is_finished[C::kSlots];  // The run: all its tiles, by all blocks.
  unsigned warp_sums[kWarpLanes];
};

struct RunShape {
  int rows = 0;
  int tiles = 0;
};

// The run that begins at `row`, or none. Runs end with a sequence and at multiples of kSlots rows,
// so that they do not depend on who asks.
template <typename C>
__device__ __forceinline__ RunShape RunAt(const IndexerPass& pass, int row) {
  const int32_t* sequence = pass.batch.row_sequence + pass.first_row + row;
  if (*sequence < 0) return {};
  const int place = row % C::kSlots;
  if (place != 0 && sequence[-1] == *sequence) return {};
  const int left = static_cast<int>(pass.rows) - row;
  const int most = min(C::kSlots - place, left);
  int rows = 1;
  while (rows < most && sequence[rows] == *sequence) ++rows;
  const int64_t visible = VisibleKeys(pass.batch.row_position[pass.first_row + row + rows - 1]);
  if (!NeedsScores(visible, pass.topk, pass.has_dump)) return {};
  return {rows, static_cast<int>((visible + C::kKeys - 1) / (C::kKeys))};
}

// The share of the block in the tiles of all runs.
template <typename C>
__device__ void FindShare(const IndexerPass& pass, Shared<C>& shared) {
  const int rows = static_cast<int>(pass.rows);
  const int per_thread = (rows + C::kThreads - 1) / C::kThreads;
  const int first = static_cast<int>(threadIdx.x) * per_thread;
  const int last = min(rows, first + per_thread);
  unsigned mine = 0;
  for (int row = first; row < last; ++row) {
    mine += static_cast<unsigned>(RunAt<C>(pass, row).tiles);
  }
  unsigned total = 0;
  unsigned before = SumBefore<C::kThreads>(mine, shared.warp_sums, &total);
  const auto begin = static_cast<unsigned>(uint64_t{total} * blockIdx.x / gridDim.x);
  const auto end = static_cast<unsigned>(uint64_t{total} * (blockIdx.x + 1) / gridDim.x);
  if (threadIdx.x == 0) shared.left = static_cast<int>(end - begin);
  if (before <= begin && begin < before + mine) {
    for (int row = first; row < last; ++row) {
      const auto tiles = static_cast<unsigned>(RunAt<C>(pass, row).tiles);
      if (begin < before + tiles) {
        shared.next_row = row;
        shared.next_tile = static_cast<int>(begin - before);
        break;
      }
      before += tiles;
    }
  }
  __syncthreads();
}

// The next runs of the block, as many as there are slots. By one warp.
template <typename C>
__device__ void PlanBatch(const IndexerPass& pass, Shared<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int left = shared.left;
  int row = shared.next_row;
  int tile = shared.next_tile;
  int runs = 0;
  int slots = 0;
  int items = 0;
  bool is_full = false;
  __syncwarp();
  while (!is_full && items < left) {
    RunShape mine;
    if (row + lane < pass.rows) mine = RunAt<C>(pass, row + lane);
    unsigned found = __ballot_sync(kFullWarp, mine.tiles > 0 ? 1 : 0);
    int next = row + kWarpLanes;
    while (found != 0 && items < left) {
      const int source = __ffs(static_cast<int>(found)) - 1;
      const int rows = __shfl_sync(kFullWarp, mine.rows, source);
      const int tiles = __shfl_sync(kFullWarp, mine.tiles, source);
      if (slots + rows > C::kSlots) {
        next = row + source;
        is_full = true;
        break;
      }
      if (lane == 0) shared.runs[runs] = {row + source, rows, slots, tile, items};
      items += min(tiles - tile, left - items);
      tile = 0;
      slots += rows;
      ++runs;
      found &= found - 1;
    }
    row = next;
  }
  if (lane == 0) {
    shared.num_runs = runs;
    shared.num_slots = slots;
    shared.num_items = items;
    shared.left = left - items;
    shared.next_row = row;
    shared.next_tile = tile;
  }
}

// The run that item `item` of the batch belongs to, and the first key of its tile.
template <typename C>
__device__ __forceinline__ const Run& RunOf(const Shared<C>& shared, int item) {
  int r = 0;
  while (r + 1 < shared.num_runs && shared.runs[r + 1].first_item <= item) ++r;
  return shared.runs[r];
}
template <typename C>
__device__ __forceinline__ int FirstKey(const Run& run, int item) {
  return (run.first_tile + item - run.first_item) * C::kKeys;
}

// Starts the copies of an item's keys. A tile lies within a page; keys that nobody sees are copied
// along, and stay in their own columns.
template <typename C>
__device__ __forceinline__ void FetchKeys(const IndexerPass& pass, Shared<C>& shared, int item) {
  constexpr int kPieces = kKeyBytes<C::kFormat> / 16;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const Run& run = RunOf(shared, item);
  const int first_key = FirstKey<C>(run, item);
  const int32_t sequence = pass.batch.row_sequence[pass.first_row + run.first_row];
  const int page_number = first_key / pass.plane.entries;
  const int entry = first_key - page_number * pass.plane.entries;
  std::byte* page = pass.batch.sequences[sequence].pages[kIndexKey][page_number];
  const std::byte* data = EntryData(pass.plane, page, entry);
  // A warp copies 512 bytes at a time, an even number of keys (or one pair): the swap of halves is
  // that of the first.
  unsigned char* target =
      shared.keys[warp] + PieceOffset<C::kFormat>(lane / kPieces, lane % kPieces);
#pragma unroll
  for (int i = 0; i < C::kKeys * kKeyBytes<C::kFormat> / 512; ++i) {
    CopyAsync16(target + 512 * i, data + 16 * lane + 512 * i);
  }
  if constexpr (kHasScales<C::kFormat>) {
    if (lane < C::kKeys) {
      CopyAsyncSmall<4>(&shared.scales[warp][lane], EntryScale(pass.plane, page, entry) + 4 * lane);
    }
  }
  CommitCopies();
}

// The queries of the batch's rows as operands, and their weights. A warp takes a head at a time.
template <typename C>
__device__ void StageQueries(const IndexerPass& pass, Shared<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int heads = static_cast<int>(pass.num_heads);
  const int padded_heads = (heads + 15) / 16 * 16;
  const int t = lane % 4;
  const int s = lane / 4;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) / kWarpLanes; i < shared.num_slots * padded_heads;
       i += C::kWarps) {
    const int slot = i / padded_heads;
    const int h = i % padded_heads;
    int r = 0;
    while (r + 1 < shared.num_runs && shared.runs[r + 1].slot <= slot) ++r;
    const int64_t row = pass.first_row + shared.runs[r].first_row + slot - shared.runs[r].slot;
    const float* q = pass.q + row * pass.q_stride + int64_t{h} * kDim;
    float x[4] = {};
    if (h < heads) {
#pragma unroll
      for (int n = 0; n < 4; ++n) x[n] = q[ChannelOf<C::kFormat>(t, s, n / 2, n % 2)];
    }
    const float amax =
        WarpMax(fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))));
    const int exponent = HeadExponent<C::kFormat>(amax);
    const float inverse = PowerOfTwo(-exponent);
    auto* words =
        reinterpret_cast<uint32_t*>(&shared.q[slot][h / 16][s][(4 * (h % 8) + t) ^ (s & 4)]);
    words[h % 16 / 8] = QueryPair<C::kFormat>(x[0] * inverse, x[1] * inverse);
    words[2 + h % 16 / 8] = QueryPair<C::kFormat>(x[2] * inverse, x[3] * inverse);
    if (lane == 0) {
      shared.w[slot][h] = h < heads ? pass.w[row * pass.w_stride + h] * PowerOfTwo(exponent) : 0.0f;
    }
  }
}

// Adds the terms of two heads, g and g + 8 of a tile, for the keys 2t and 2t + 1.
__device__ __forceinline__ void AddTerms(const float (&dot)[4], float w0, float w1,
                                         float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float w = half == 0 ? w0 : w1;
    const uint32_t positive = Bf16PairRelu(dot[2 * half], dot[2 * half + 1]);
    const uint32_t terms = Bf16Pair(LowBf16(positive) * w, HighBf16(positive) * w);
    sum[0] += LowBf16(terms);
    sum[1] += HighBf16(terms);
  }
}

// The sum over the eight lanes that share t, each lane with the key KeyOfLane of the tiles.
template <int kTiles>
__device__ __forceinline__ float SumOverHeads(const float (&sum)[kTiles][2]) {
  const int g = static_cast<int>(threadIdx.x) % kWarpLanes / 4;
  float two[2][2];
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = n / 2;
    const int e = n % 2;
    if constexpr (kTiles == 4) {
      const bool high = (g & 4) != 0;
      const float mine = high ? sum[2 + i][e] : sum[i][e];
      const float other = high ? sum[i][e] : sum[2 + i][e];
      two[i][e] = mine + __shfl_xor_sync(kFullWarp, other, 16);
    } else {
      two[i][e] = sum[i][e] + __shfl_xor_sync(kFullWarp, sum[i][e], 16);
    }
  }
  float one[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const bool high = (g & 2) != 0;
    const float mine = high ? two[1][e] : two[0][e];
    const float other = high ? two[0][e] : two[1][e];
    one[e] = mine + __shfl_xor_sync(kFullWarp, other, 8);
  }
  const bool high = (g & 1) != 0;
  return (high ? one[1] : one[0]) + __shfl_xor_sync(kFullWarp, high ? one[0] : one[1], 4);
}
template <int kTiles>
__device__ __forceinline__ int KeyOfLane() {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int g = lane / 4;
  return 8 * (kTiles == 4 ? g / 2 : g / 2 % 2) + 2 * (lane % 4) + g % 2;
}

// The scores of one row with the keys of a tile; lanes of the same KeyOfLane hold the same.
template <typename C>
__device__ __forceinline__ float ScoreTile(const uint4 (&q)[kHeadTiles][kSteps][kWarpLanes],
                                           const float* w,
                                           const uint32_t (&keys)[C::kTiles][kSteps][2],
                                           int heads) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  float sum[C::kTiles][2] = {};
#pragma unroll 1
  for (int m = 0; 16 * m < heads; ++m) {
    float dot[C::kTiles][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const uint4 words = q[m][s][lane ^ (s & 4)];
      const uint32_t a[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < C::kTiles; ++i) MultiplyAdd<C::kFormat>(dot[i], a, keys[i][s]);
    }
    const float w0 = w[16 * m + lane / 4];
    const float w1 = w[16 * m + lane / 4 + 8];
#pragma unroll
    for (int i = 0; i < C::kTiles; ++i) AddTerms(dot[i], w0, w1, sum[i]);
  }
  return SumOverHeads<C::kTiles>(sum);
}

// Waits for the keys of an item, starts the copies of the warp's next one, and scores all rows.
template <typename C>
__device__ __forceinline__ void ScoreItem(const IndexerPass& pass, Shared<C>& shared, int item) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  WaitForCopies<0>();
  __syncwarp();
  uint32_t keys[C::kTiles][kSteps][2];
#pragma unroll
  for (int i = 0; i < C::kTiles; ++i) {
    LoadKey<C::kFormat>(shared.keys[warp], shared.scales[warp], 8 * i + lane / 4, keys[i]);
  }
  const float factor = KeyFactor<C::kFormat>(shared.scales[warp], KeyOfLane<C::kTiles>());
  __syncwarp();
  if (item + C::kWarps < shared.num_items) FetchKeys(pass, shared, item + C::kWarps);

  const Run& run = RunOf(shared, item);
  const int first_key = FirstKey<C>(run, item);
#pragma unroll 1
  for (int i = 0; i < run.rows; ++i) {
    const int row = run.first_row + i;
    const auto visible =
        static_cast<int>(VisibleKeys(pass.batch.row_position[pass.first_row + row]));
    if (visible <= first_key || !NeedsScores(visible, pass.topk, pass.has_dump)) continue;
    const int slot = run.slot + i;
    const float sum =
        ScoreTile<C>(shared.q[slot], shared.w[slot], keys, static_cast<int>(pass.num_heads));
    const bool writes = C::kTiles == 4 || lane < kWarpLanes / 2;
    const int column = first_key + KeyOfLane<C::kTiles>();
    if (writes && column < visible) {
      pass.scores[row * pass.stride + column] = RoundBf16(sum * factor);
    }
  }
}

// Rows that need no scores, listed by the blocks in turn.
template <typename C>
__device__ __forceinline__ void ListShortRows(const IndexerPass& pass) {
  for (int64_t row = blockIdx.x; row < pass.rows; row += gridDim.x) {
    const IndexerRow r = RowOf(pass.batch, pass.first_row + row);
    if (r.sequence == nullptr || NeedsScores(r.visible, pass.topk, false)) continue;
    for (int64_t k = threadIdx.x; k < pass.topk; k += C::kThreads) {
      pass.selected[row * pass.topk + k] = k < r.visible ? static_cast<int32_t>(k) : -1;
    }
  }
}

// Selects the rows of the batch's runs whose last tile this block has scored. `finished`[rows of
// the pass] counts tiles per run, at its first row, and is 0 again afterwards. Called by all
// threads after their scores; overwrites the queries.
template <typename C>
__device__ void SelectFinished(const IndexerPass& pass, Shared<C>& shared, unsigned* finished) {
  static_assert(sizeof(RadixShared) <= sizeof(shared.q));
  __threadfence();
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread < shared.num_runs) {
    const Run& run = shared.runs[thread];
    const int next =
        thread + 1 < shared.num_runs ? shared.runs[thread + 1].first_item : shared.num_items;
    const auto mine = static_cast<unsigned>(next - run.first_item);
    const auto all = static_cast<unsigned>(RunAt<C>(pass, run.first_row).tiles);
    const bool is_last = atomicAdd(finished + run.first_row, mine) + mine == all;
    if (is_last) finished[run.first_row] = 0;
    shared.is_finished[thread] = is_last;
    __threadfence();
  }
  __syncthreads();
  auto& radix = *reinterpret_cast<RadixShared*>(DynamicShared());  // In place of q.
  for (int r = 0; r < shared.num_runs; ++r) {
    if (!shared.is_finished[r]) continue;
    for (int i = 0; i < shared.runs[r].rows; ++i) {
      const int64_t row = shared.runs[r].first_row + i;
      const auto visible =
          static_cast<int>(VisibleKeys(pass.batch.row_position[pass.first_row + row]));
      if (!NeedsScores(visible, pass.topk, false)) continue;
      RadixSelect<C::kThreads, kHeldRanks>(pass.scores + row * pass.stride, visible, pass.topk,
                                           true, radix, pass.selected + row * pass.topk);
    }
  }
}

// Grid: any, one block per SM is meant; blocks share all tiles evenly. Block: C::kThreads. Shared
// memory: Shared<C>. Pages begin at 16 bytes and hold whole tiles.
template <typename C>
__global__ __launch_bounds__(C::kThreads, 1) void ScoreKeysByMma(
    const __grid_constant__ IndexerPass pass,
    unsigned* finished) {  // [rows of the pass], zeros; null unless C::kSelects
  auto& shared = *reinterpret_cast<Shared<C>*>(DynamicShared());
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  FindShare(pass, shared);
  if constexpr (C::kSelects) ListShortRows<C>(pass);
  while (shared.left > 0) {
    __syncthreads();
    if (warp == 0) PlanBatch(pass, shared);
    __syncthreads();
    if (warp < shared.num_items) FetchKeys(pass, shared, warp);
    StageQueries(pass, shared);
    __syncthreads();
    for (int item = warp; item < shared.num_items; item += C::kWarps) ScoreItem(pass, shared, item);
    if constexpr (C::kSelects) SelectFinished(pass, shared, finished);
  }
}

template <typename C>
absl::Status LaunchCut(const IndexerPass& pass, const Exec& exec) {
  static_assert(sizeof(Shared<C>) <= kMaxSharedBytes);
  return Launch("ScoreKeysByMma",
                {.grid = dim3(static_cast<unsigned>(exec.num_sms)),
                 .block = dim3(C::kThreads),
                 .shared_bytes = sizeof(Shared<C>)},
                exec, ScoreKeysByMma<C>, pass, C::kSelects ? exec.counters : nullptr);
}

template <bool kSelects>
absl::Status LaunchFormat(const IndexerPass& pass, const Exec& exec) {
  if (pass.plane.format == EntryFormat::kKeyBf16) {
    return LaunchCut<Cut<EntryFormat::kKeyBf16, 2, kSelects>>(pass, exec);
  }
  // Half tiles spread few keys over more warps; the bits are the same.
  const bool is_small = pass.rows * pass.bound <= int64_t{exec.num_sms} * 256;
  if (pass.plane.format == EntryFormat::kKeyFp8) {
    return is_small ? LaunchCut<Cut<EntryFormat::kKeyFp8, 2, kSelects>>(pass, exec)
                    : LaunchCut<Cut<EntryFormat::kKeyFp8, 4, kSelects>>(pass, exec);
  }
  return is_small ? LaunchCut<Cut<EntryFormat::kKeyFp4, 2, kSelects>>(pass, exec)
                  : LaunchCut<Cut<EntryFormat::kKeyFp4, 4, kSelects>>(pass, exec);
}

}  // namespace mma_scores

absl::Status ScoreByMma(const IndexerPass& pass, const Exec& exec) {
  return mma_scores::LaunchFormat<false>(pass, exec);
}

absl::Status ScoreAndSelectByMma(const IndexerPass& pass, const Exec& exec) {
  return mma_scores::LaunchFormat<true>(pass, exec);
}

}  // namespace isthmus::kernels
