// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of sampling, any architecture: a block per row. Nothing is sorted: the
// token at an edge of the ranked masses is found by bisection over (logit, id), each step one pass
// over the row. Masses are fixed-point integers, so their sums are exact in any order. Bound by
// those passes, about 50 per edge, over 4 * vocab bytes in the L2; greedy rows take one.
#include "kernels/sampling/sampling_device.cuh"
#include "kernels/sampling/sampling_variants.h"

namespace isthmus::kernels {
namespace {

// The first in rank order, or all ones when no logit is finite.
__device__ uint64_t FirstRanked(const float* logits, int64_t vocab, Tally* tallies) {
  uint64_t first = ~uint64_t{0};
  for (int64_t id = threadIdx.x; id < vocab; id += kSamplingThreads) {
    if (!IsFinite(logits[id])) continue;
    const uint64_t rank = RankOf(logits[id], id);
    first = rank < first ? rank : first;
  }
  return BlockMin(first, tallies);
}

// A pass over the row for every question.
struct BisectedRanking {
  const Row& row;

  __device__ Tally All() const { return TallyUpTo(row, 0xffffffffu, row.vocab); }
  __device__ Edge FindEdge(const Goal& goal) const { return FindEdgeByBisection(row, goal); }
  __device__ Tally TallyOfLikely(float least) const {
    Tally mine;
    for (int64_t i = threadIdx.x; i < row.vocab; i += kSamplingThreads) {
      if (!IsFinite(row.logits[i])) continue;
      const float mass = MassOf(row, row.logits[i]);
      if (mass < least) continue;
      mine.mass += UnitsOf(mass);
      mine.count += 1;
    }
    return BlockSum(mine, row.tallies);
  }
};

// Grid: rows. Block: kSamplingThreads.
__global__ __launch_bounds__(kSamplingThreads) void SampleBlockPerRow(
    const float* __restrict__ logits,  // [rows, vocab], rows logits_stride apart
    int64_t vocab, int64_t logits_stride,
    const float* __restrict__ temperature,  // [rows]
    const float* __restrict__ top_p,        // [rows]
    const int32_t* __restrict__ top_k,      // [rows]
    const float* __restrict__ min_p,        // [rows]
    const uint64_t* __restrict__ seed,      // [rows]
    const uint64_t* __restrict__ counter,   // [rows]
    int32_t* __restrict__ tokens) {         // [rows]
  __shared__ Tally tallies[kSamplingWarps];
  const int64_t t = blockIdx.x;
  Row row = {logits + t * logits_stride, vocab, 0.0f, temperature[t], tallies};
  const uint64_t first = FirstRanked(row.logits, vocab, tallies);
  auto token = static_cast<int32_t>(first & 0xffffffffu);
  if (first == ~uint64_t{0}) {
    token = -1;
  } else if (row.temperature > 0.0f) {
    row.largest = row.logits[token];
    BisectedRanking ranking{row};
    token = DrawToken(ranking, {top_p[t], top_k[t], min_p[t], UniformAt(seed[t], counter[t])});
  }
  if (threadIdx.x == 0) tokens[t] = token;
}

}  // namespace

absl::Status LaunchSampleBatchCuda(const SamplingBatchArgs& args, const Exec& exec) {
  return LaunchRows("SampleBlockPerRow", SampleBlockPerRow, args, exec);
}

}  // namespace isthmus::kernels
