// SPDX-License-Identifier: Apache-2.0
// Who scores what: every block finds its even share of all tiles of all rows from the positions in
// device memory, and takes it in batches of as many rows as it has slots for queries.
#pragma once

#include "kernels/indexer/indexer_passes.h"
#include "kernels/indexer/mma_keys.cuh"
#include "kernels/indexer/radix_select.cuh"

namespace isthmus::kernels::mma_scores {

inline constexpr int kHeadTiles = 4;
inline constexpr int kHeads = 16 * kHeadTiles;  // At most.

// How a kernel is cut.
template <EntryFormat kFormatOf, int kTilesOf, bool kSelectsOf>
struct Cut {
  static constexpr EntryFormat kFormat = kFormatOf;
  static constexpr int kTiles = kTilesOf;  // Of 8 keys, of a warp.
  static constexpr int kKeys = 8 * kTiles;
  static constexpr bool kSelects = kSelectsOf;
  static constexpr int kWarps = 16;
  static constexpr int kThreads = kWarps * kWarpLanes;
  // Rows whose queries lie in shared memory together: what the keys leave.
  static constexpr int kSlots = kFormat == EntryFormat::kKeyFp4 ? 3 : 2;
};

// Consecutive rows of one sequence and a range of tiles of its keys.
struct Run {
  int first_row;  // Of the pass.
  int rows;
  int slot;  // Of the first row.
  int first_tile;
  int first_item;  // Tiles of earlier runs of the batch.
  std::byte* const* pages;
};

template <typename C>
struct Shared {
  uint4 q[C::kSlots][kHeadTiles][kSteps][kWarpLanes];  // A operands; lane ^ (s & 4)
  uint32_t w[C::kSlots][kHeads];  // Twice as bf16, times the power of two of the head.
  alignas(
      16) unsigned char keys[C::kWarps][C::kKeys * kKeyBytes<C::kFormat>];  // Of one tile per warp
  uint32_t scales[C::kWarps][C::kKeys];
  std::byte* next_page[C::kWarps];  // Of the warp's next item: it comes with the keys of this one.
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
      if (lane == 0) {
        const int32_t sequence = pass.batch.row_sequence[pass.first_row + row + source];
        shared.runs[runs] = {row + source, rows,  slots,
                             tile,         items, pass.batch.sequences[sequence].pages[kIndexKey]};
      }
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

// What all blocks ask first, into L2: one latency of memory instead of three in turn.
__device__ __forceinline__ void PrefetchBatch(const IndexerPass& pass) {
  const int64_t i = threadIdx.x;
  if (i < pass.rows) {
    PrefetchL2(pass.batch.row_sequence + pass.first_row + i);
    PrefetchL2(pass.batch.row_position + pass.first_row + i);
  }
  if (i < pass.batch.num_sequences) PrefetchL2(pass.batch.sequences + i);
}

}  // namespace isthmus::kernels::mma_scores
