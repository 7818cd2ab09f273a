// SPDX-License-Identifier: Apache-2.0
// Exact selection of a row's largest scores by one block: digits of the scores' ranks are counted
// from the top until the last entry's rank is known, or all entries that share its digits belong to
// the selection. Ties go to the smaller index; entries come out in ascending order.
#pragma once

#include "kernels/core/launch.cuh"
#include "kernels/indexer/indexer_variants.h"

namespace isthmus::kernels {

inline constexpr int kTopDigitBits = 12;  // So that scores of one magnitude share few counters.
inline constexpr int kDigitBits = 10;     // Of the further digits of f32,
inline constexpr int kLastDigitBits = 4;  // or of the only further one of bf16.

// Each digit has counters of its own, so that nobody waits for others before counting the next.
struct RadixShared {
  alignas(16) unsigned top[1 << kTopDigitBits];
  alignas(16) unsigned further[2][1 << kDigitBits];
  unsigned digit_sums[3][kWarpLanes];
  unsigned warp_sums[kWarpLanes];
};

// The digit of the last entry of a selection, as all threads know it.
struct Digit {
  unsigned value;
  unsigned before;  // Entries with smaller ones,
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

// For one selection. A barrier follows.
template <int kThreads>
__device__ __forceinline__ void ClearCounts(bool is_reference, RadixShared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread; i < 1 << kTopDigitBits; i += kThreads) shared.top[i] = 0;
  const int further = is_reference ? 1 << kLastDigitBits : 2 << kDigitBits;
  for (int i = thread; i < further; i += kThreads) shared.further[0][i] = 0;
}

// The sum over this lane and those before it.
__device__ __forceinline__ unsigned SumUpTo(unsigned value) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const unsigned other = __shfl_up_sync(kFullWarp, value, static_cast<unsigned>(lanes));
    if (lane >= lanes) value += other;
  }
  return value;
}

// The first lane whose sum reaches `wanted`, and the sum before it.
__device__ __forceinline__ int LaneOf(unsigned value, unsigned wanted, unsigned* before) {
  const unsigned sum = SumUpTo(value);
  const int lane = __ffs(static_cast<int>(__ballot_sync(kFullWarp, sum >= wanted ? 1 : 0))) - 1;
  *before = __shfl_sync(kFullWarp, sum - value, lane);
  return lane;
}

// The digit of the wanted-th entry (1 is the first) among the kDigits counters, by every warp for
// itself. After a barrier behind the counting; has one of its own when kDigits > kWarpLanes.
template <int kThreads, int kDigits>
__device__ __forceinline__ Digit FindDigit(const unsigned* counts, unsigned wanted,
                                           unsigned* warp_sums) {
  constexpr int kWarps = kThreads / kWarpLanes;
  const int lane = static_cast<int>(threadIdx.x) % kWarpLanes;
  unsigned before = 0;
  if constexpr (kDigits <= kWarpLanes) {
    const unsigned mine = lane < kDigits ? counts[lane] : 0;
    const int digit = LaneOf(mine, wanted, &before);
    return {static_cast<unsigned>(digit), before, __shfl_sync(kFullWarp, mine, digit)};
  } else {
    constexpr int kShare = kDigits / kWarps;   // A warp's digits,
    constexpr int kOwn = kShare / kWarpLanes;  // and a lane's.
    static_assert(kOwn >= 1 && kShare % kWarpLanes == 0);
    const int warp = static_cast<int>(threadIdx.x) / kWarpLanes;
    unsigned mine = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) mine += counts[warp * kShare + i * kWarpLanes + lane];
    mine = __reduce_add_sync(kFullWarp, mine);
    if (lane == 0) warp_sums[warp] = mine;
    __syncthreads();
    const int share = LaneOf(lane < kWarps ? warp_sums[lane] : 0, wanted, &before);
    // All look through the same warp's digits, a lane a run of them.
    unsigned own[kOwn];
    unsigned sum = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) sum += own[i] = counts[share * kShare + lane * kOwn + i];
    unsigned inside = 0;
    const int run = LaneOf(sum, wanted - before, &inside);
    before += inside;
    Digit digit = {static_cast<unsigned>(share * kShare + run * kOwn), before, 0};
    bool is_found = false;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const unsigned count = __shfl_sync(kFullWarp, own[i], run);
      if (is_found) continue;
      digit.count = count;
      is_found = digit.before + count >= wanted;
      if (!is_found) {
        ++digit.value;
        digit.before += count;
      }
    }
    return digit;
  }
}

// Counts, of the ranks that begin with `prefix`, the digit of `bits` bits at `shift`.
template <int kThreads, int kHeld>
__device__ __forceinline__ void CountDigits(const float* scores, int visible,
                                            const uint32_t (&held)[kHeld], int num_held,
                                            uint32_t prefix, int shift, int bits,
                                            unsigned* counts) {
  constexpr int kChunk = kThreads * kHeld;
  const auto count = [&](uint32_t rank) {
    const uint32_t above = rank >> shift;
    if (above >> bits == prefix) atomicAdd(&counts[above & ((1u << bits) - 1u)], 1u);
  };
#pragma unroll
  for (int e = 0; e < kHeld; ++e) {
    if (e < num_held) count(held[e]);
  }
  for (int first = kChunk; first < visible; first += kChunk) {
    uint32_t ranks[kHeld];
    const int n = LoadRanks(scores, first + static_cast<int>(threadIdx.x) * kHeld, visible, ranks);
#pragma unroll
    for (int e = 0; e < kHeld; ++e) {
      if (e < n) count(ranks[e]);
    }
  }
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
// each with the ranks of kHeld consecutive entries in registers. ClearCounts has been called and
// no barrier has followed; one stands at the end.
// In reference arithmetic scores lie on the bf16 grid: the upper half of a rank is all of it.
template <int kThreads, int kHeld>
__device__ __forceinline__ void RadixSelect(const float* scores, int visible, int64_t topk,
                                            bool is_reference, RadixShared& shared, int32_t* out) {
  uint32_t held[kHeld];
  const int num_held = LoadRanks(scores, static_cast<int>(threadIdx.x) * kHeld, visible, held);
  auto wanted = static_cast<unsigned>(topk);
  int shift = 32 - kTopDigitBits;
  __syncthreads();
  CountDigits<kThreads, kHeld>(scores, visible, held, num_held, 0, shift, kTopDigitBits,
                               shared.top);
  __syncthreads();
  Digit digit = FindDigit<kThreads, 1 << kTopDigitBits>(shared.top, wanted, shared.digit_sums[0]);
  uint32_t prefix = digit.value;
  wanted -= digit.before;
  const int last_shift = is_reference ? 16 : 0;
  const int bits = is_reference ? kLastDigitBits : kDigitBits;
  for (int i = 0; shift != last_shift && wanted != digit.count; ++i) {
    shift -= bits;
    CountDigits<kThreads, kHeld>(scores, visible, held, num_held, prefix, shift, bits,
                                 shared.further[i]);
    __syncthreads();
    digit = is_reference
                ? FindDigit<kThreads, 1 << kLastDigitBits>(shared.further[i], wanted, nullptr)
                : FindDigit<kThreads, 1 << kDigitBits>(shared.further[i], wanted,
                                                       shared.digit_sums[1 + i]);
    prefix = prefix << bits | digit.value;
    wanted -= digit.before;
  }
  EmitEntries<kThreads, kHeld>(scores, visible, held, num_held, prefix, shift, wanted, shared, out);
}

}  // namespace isthmus::kernels
