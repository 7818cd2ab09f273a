// SPDX-License-Identifier: Apache-2.0
// Exact selection of a row's largest scores by one block: digits of the scores' ranks are counted
// from the top until the last entry's rank is known, or all entries that share its digits belong to
// the selection. Ties go to the smaller index; entries come out in ascending order.
#pragma once

#include "kernels/core/launch.cuh"
#include "kernels/indexer/indexer_variants.h"

namespace isthmus::kernels {

inline constexpr int kTopDigitBits = 12;  // So that scores of one magnitude share few counters.

struct RadixShared {
  alignas(16) unsigned counts[1 << kTopDigitBits];
  unsigned warp_sums[kWarpLanes];
  unsigned digit;   // That of the last entry of the selection,
  unsigned before;  // entries below it,
  unsigned count;   // and with it.
};

// The sum over the threads before this one, and over all. The block may call again after its next
// barrier.
template <int kThreads>
__device__ __forceinline__ unsigned SumBefore(unsigned value, unsigned* warp_sums,
                                              unsigned* total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  unsigned sum = value;
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const unsigned other = __shfl_up_sync(kFullWarp, sum, static_cast<unsigned>(lanes));
    if (lane >= lanes) sum += other;
  }
  if (lane == kWarpLanes - 1) warp_sums[warp] = sum;
  __syncthreads();
  const unsigned of_warp = lane < kThreads / kWarpLanes ? warp_sums[lane] : 0;
  *total = __reduce_add_sync(kFullWarp, of_warp);
  return sum - value + __reduce_add_sync(kFullWarp, lane < warp ? of_warp : 0u);
}

// Ranks of the entries [first, first + kHeld); returns how many of them the row has. Scores
// may have been written by other blocks of this launch: L1 is passed by.
template <int kHeld>
__device__ __forceinline__ int LoadRanks(const float* scores, int first, int visible,
                                         uint32_t (&ranks)[kHeld]) {
  const int left = visible - first;
  if (left <= 0) return 0;
  const float* from = scores + first;
  if (left >= kHeld && reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0) {
#pragma unroll
    for (int e = 0; e < kHeld; e += 4) {
      const float4 four = __ldcg(reinterpret_cast<const float4*>(from + e));
      ranks[e] = ScoreRank(four.x);
      ranks[e + 1] = ScoreRank(four.y);
      ranks[e + 2] = ScoreRank(four.z);
      ranks[e + 3] = ScoreRank(four.w);
    }
    return kHeld;
  }
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    if (e < left) ranks[e] = ScoreRank(__ldcg(from + e));
  }
  return left < kHeld ? left : kHeld;
}

template <int kThreads>
__device__ __forceinline__ void ClearCounts(int bits, RadixShared& shared) {
  for (int i = static_cast<int>(threadIdx.x); i < 1 << bits; i += kThreads) shared.counts[i] = 0;
}

// The sum of the `count` counters from `first` on; four that begin at 16 bytes come at once.
__device__ __forceinline__ unsigned SumCounts(const RadixShared& shared, int first, int count) {
  if (count == 4 && first % 4 == 0) {
    const uint4 four = *reinterpret_cast<const uint4*>(shared.counts + first);
    return four.x + four.y + four.z + four.w;
  }
  unsigned sum = 0;
  for (int i = first; i < first + count; ++i) sum += shared.counts[i];
  return sum;
}

// Counts the digit of `bits` bits at `shift` of the ranks that begin with `prefix`, and leaves in
// `shared` the digit of the wanted-th of them (1 is the first). The counters have been cleared.
template <int kThreads, int kHeld>
__device__ __forceinline__ void FindDigit(const float* scores, int visible,
                                          const uint32_t (&held)[kHeld], int num_held,
                                          uint32_t prefix, int shift, int bits, unsigned wanted,
                                          RadixShared& shared) {
  constexpr int kChunk = kThreads * kHeld;
  const int thread = static_cast<int>(threadIdx.x);
  const int digits = 1 << bits;
  __syncthreads();
  const auto count = [&](uint32_t rank) {
    const uint32_t above = rank >> shift;
    if (above >> bits == prefix) {
      atomicAdd(&shared.counts[above & static_cast<unsigned>(digits - 1)], 1u);
    }
  };
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    if (e < num_held) count(held[e]);
  }
  for (int first = kChunk; first < visible; first += kChunk) {
    uint32_t ranks[kHeld];
    const int n = LoadRanks(scores, first + thread * kHeld, visible, ranks);
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      if (e < n) count(ranks[e]);
    }
  }
  __syncthreads();
  const int per_thread = (digits + kThreads - 1) / kThreads;
  const int begin = min(thread * per_thread, digits);
  const int mine = min(per_thread, digits - begin);
  const unsigned sum = SumCounts(shared, begin, mine);
  unsigned total = 0;
  unsigned before = SumBefore<kThreads>(sum, shared.warp_sums, &total);
  if (before < wanted && wanted <= before + sum) {  // One thread.
    int digit = begin;
    while (before + shared.counts[digit] < wanted) before += shared.counts[digit++];
    shared.digit = static_cast<unsigned>(digit);
    shared.before = before;
    shared.count = shared.counts[digit];
  }
  __syncthreads();
}

// Writes the entries whose rank begins with less than `prefix`, and the first `wanted` of those
// that begin with it.
template <int kThreads, int kHeld>
__device__ __forceinline__ void EmitEntries(const float* scores, int visible,
                                            const uint32_t (&held)[kHeld], int num_held,
                                            uint32_t prefix, int shift, unsigned wanted,
                                            RadixShared& shared, int32_t* out) {
  constexpr int kChunk = kThreads * kHeld;
  static_assert(kChunk < 1 << 16, "Both counts of a chunk share a word.");
  unsigned below = 0;  // Of earlier chunks.
  unsigned ties = 0;
  for (int chunk = 0; chunk < visible; chunk += kChunk) {
    const int first = chunk + static_cast<int>(threadIdx.x) * kHeld;
    uint32_t ranks[kHeld];
    int n = num_held;
    if (chunk == 0) {
#pragma unroll
      for (int e = 0; e < kHeld; ++e) ranks[e] = held[e];
    } else {
      n = LoadRanks(scores, first, visible, ranks);
    }
    unsigned mine = 0;
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      if (e < n && ranks[e] >> shift < prefix) mine += 1u << 16;
      if (e < n && ranks[e] >> shift == prefix) mine += 1;
    }
    unsigned total = 0;
    const unsigned before = SumBefore<kThreads>(mine, shared.warp_sums, &total);
    unsigned my_below = below + (before >> 16);
    unsigned my_ties = ties + (before & 0xffffu);
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      if (e >= n || ranks[e] >> shift > prefix) continue;
      const bool is_tie = ranks[e] >> shift == prefix;
      if (!is_tie || my_ties < wanted) {
        out[my_below + (my_ties < wanted ? my_ties : wanted)] = first + e;
      }
      my_ties += is_tie ? 1 : 0;
      my_below += is_tie ? 0 : 1;
    }
    below += total >> 16;
    ties += total & 0xffffu;
    __syncthreads();
  }
}

// out[topk] = the selection of scores[visible], topk < visible, by all kThreads threads of a block,
// each with the ranks of kHeld consecutive entries in registers.
// In reference arithmetic scores lie on the bf16 grid: the upper half of a rank is all of it.
template <int kThreads, int kHeld>
__device__ __forceinline__ void RadixSelect(const float* scores, int visible, int64_t topk,
                                            bool is_reference, RadixShared& shared, int32_t* out) {
  uint32_t held[kHeld];
  ClearCounts<kThreads>(kTopDigitBits, shared);
  const int num_held = LoadRanks(scores, static_cast<int>(threadIdx.x) * kHeld, visible, held);
  const int last_shift = is_reference ? 16 : 0;
  auto wanted = static_cast<unsigned>(topk);
  uint32_t prefix = 0;
  int shift = 32;
  while (true) {
    const int bits = shift == 32 ? kTopDigitBits : is_reference ? 4 : 10;
    shift -= bits;
    FindDigit<kThreads, kHeld>(scores, visible, held, num_held, prefix, shift, bits, wanted,
                               shared);
    prefix = prefix << bits | shared.digit;
    wanted -= shared.before;
    if (shift == last_shift || wanted == shared.count) break;
    ClearCounts<kThreads>(is_reference ? 4 : 10, shared);  // A barrier stands after it.
  }
  EmitEntries<kThreads, kHeld>(scores, visible, held, num_held, prefix, shift, wanted, shared, out);
}

}  // namespace isthmus::kernels
