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
#include "kernels/indexer/mma_plan.cuh"
#include "kernels/indexer/radix_select.cuh"

namespace isthmus::kernels {
namespace mma_scores {

constexpr int kHeldRanks = 8;  // Of a row, in registers of a thread that selects.

// A division is some 150 cycles in a row, before every tile.
__device__ __forceinline__ unsigned PageNumber(const IndexerPass& pass, unsigned key) {
  if (pass.page_bits >= 0) return key >> pass.page_bits;
  return key / static_cast<unsigned>(pass.plane.entries);
}

// Where the address of an item's page lies.
template <typename C>
__device__ __forceinline__ std::byte* const* PagePlace(const IndexerPass& pass,
                                                       const Shared<C>& shared, int item) {
  const Run& run = RunOf(shared, item);
  return run.pages + PageNumber(pass, static_cast<unsigned>(FirstKey<C>(run, item)));
}

// Starts the copies of an item's keys from its page, and of the address of the warp's next page. A
// tile lies within a page; keys that nobody sees are copied along, and stay in their own columns.
template <typename C>
__device__ __forceinline__ void FetchKeys(const IndexerPass& pass, Shared<C>& shared, int item,
                                          std::byte* page) {
  constexpr int kPieces = kKeyBytes<C::kFormat> / 16;
  const int lane = FreshLane();
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const auto key = static_cast<unsigned>(FirstKey<C>(RunOf(shared, item), item));
  const unsigned entry = key - PageNumber(pass, key) * static_cast<unsigned>(pass.plane.entries);
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
  if (lane == 0 && item + C::kWarps < shared.num_items) {
    CopyAsyncSmall<8>(&shared.next_page[warp], PagePlace(pass, shared, item + C::kWarps));
  }
  CommitCopies();
}

// The row of the pass whose queries lie in a slot.
template <typename C>
__device__ __forceinline__ int64_t RowOfSlot(const IndexerPass& pass, const Shared<C>& shared,
                                             int slot) {
  int r = 0;
  while (r + 1 < shared.num_runs && shared.runs[r + 1].slot <= slot) ++r;
  return pass.first_row + shared.runs[r].first_row + slot - shared.runs[r].slot;
}

// The queries of the batch's rows, into L2 while the addresses of pages are on their way.
template <typename C>
__device__ __forceinline__ void PrefetchQueries(const IndexerPass& pass, const Shared<C>& shared) {
  constexpr int kSectorFloats = 8;
  const int64_t floats = pass.num_heads * kDim;
  for (int slot = 0; slot < shared.num_slots; ++slot) {
    const float* q = pass.q + RowOfSlot(pass, shared, slot) * pass.q_stride;
    for (int64_t i = int64_t{threadIdx.x} * kSectorFloats; i < floats;
         i += int64_t{C::kThreads} * kSectorFloats) {
      PrefetchL2(q + i);
    }
  }
}

// One head of a query as operands, and its weight. By one warp.
template <typename C>
__device__ __forceinline__ void StageHead(const float* q, float w, bool is_head, int slot, int h,
                                          Shared<C>& shared) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int t = lane % 4;
  const int s = lane / 4;
  float x[4] = {};
  if (is_head) {
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
  const float weight = is_head ? w * PowerOfTwo(exponent) : 0.0f;
  if (lane == 0) shared.w[slot][h] = Bf16Pair(weight, weight);
}

// The queries of the batch's rows as operands, and their weights. A warp takes a head at a time.
template <typename C>
__device__ void StageQueries(const IndexerPass& pass, Shared<C>& shared) {
  const int heads = static_cast<int>(pass.num_heads);
  const int padded_heads = (heads + 15) / 16 * 16;
  for (int slot = 0; slot < shared.num_slots; ++slot) {
    const int64_t row = RowOfSlot(pass, shared, slot);
    const float* q = pass.q + row * pass.q_stride;
    const float* weights = pass.w + row * pass.w_stride;
#pragma unroll 4
    for (int h = static_cast<int>(threadIdx.x) / kWarpLanes; h < padded_heads; h += C::kWarps) {
      const bool is_head = h < heads;
      const float w = is_head ? weights[h] : 0.0f;
      StageHead(q + int64_t{h} * kDim, w, is_head, slot, h, shared);
    }
  }
}

// Adds the terms of two heads, g and g + 8 of a tile, for the keys 2t and 2t + 1.
__device__ __forceinline__ void AddTerms(const float (&dot)[4], uint32_t w0, uint32_t w1,
                                         float (&sum)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t positive = Bf16PairRelu(dot[2 * half], dot[2 * half + 1]);
    const uint32_t terms = MultiplyBf16Pair(positive, half == 0 ? w0 : w1);
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
                                           const uint32_t* w,
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
    const uint32_t w0 = w[16 * m + lane / 4];
    const uint32_t w1 = w[16 * m + lane / 4 + 8];
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
  std::byte* next_page = shared.next_page[warp];
  __syncwarp();
  if (item + C::kWarps < shared.num_items) {
    FetchKeys(pass, shared, item + C::kWarps, next_page);
  }

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
      ClearCounts<C::kThreads>(true, radix);
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
  LetSuccessorStart();
  PrefetchBatch(pass);
  WaitForPredecessor();
  FindShare(pass, shared);
  if constexpr (C::kSelects) ListShortRows<C>(pass);
  while (shared.left > 0) {
    __syncthreads();
    if (warp == 0) PlanBatch(pass, shared);
    __syncthreads();
    PrefetchQueries(pass, shared);
    if (warp < shared.num_items) {
      FetchKeys(pass, shared, warp, *PagePlace(pass, shared, warp));
    }
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
                 .shared_bytes = sizeof(Shared<C>),
                 .overlaps_predecessor = true},
                exec, ScoreKeysByMma<C>, pass, C::kSelects ? exec.counters : nullptr);
}

template <bool kSelects>
absl::Status LaunchFormat(const IndexerPass& pass, const Exec& exec) {
  if (pass.plane.format == EntryFormat::kKeyBf16) {
    return LaunchCut<Cut<EntryFormat::kKeyBf16, 2, kSelects>>(pass, exec);
  }
  // Half tiles spread few keys over more warps; the bits are the same.
  const bool is_small = kSelects || FewKeysPerSm(pass.rows, pass.bound, exec);
  if (pass.plane.format == EntryFormat::kKeyFp8) {
    return is_small ? LaunchCut<Cut<EntryFormat::kKeyFp8, 2, kSelects>>(pass, exec)
                    : LaunchCut<Cut<EntryFormat::kKeyFp8, 4, false>>(pass, exec);
  }
  return is_small ? LaunchCut<Cut<EntryFormat::kKeyFp4, 2, kSelects>>(pass, exec)
                  : LaunchCut<Cut<EntryFormat::kKeyFp4, 4, false>>(pass, exec);
}

}  // namespace mma_scores

absl::Status ScoreByMma(const IndexerPass& pass, const Exec& exec) {
  return mma_scores::LaunchFormat<false>(pass, exec);
}

absl::Status ScoreAndSelectByMma(const IndexerPass& pass, const Exec& exec) {
  return mma_scores::LaunchFormat<true>(pass, exec);
}

}  // namespace isthmus::kernels
