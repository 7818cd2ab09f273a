// SPDX-License-Identifier: Apache-2.0
// The trusted CUDA path of sampling, any architecture: a block per row. Nothing is sorted: the
// token at an edge of the ranked masses is found by bisection over (logit, id), each step one pass
// over the row. Masses are fixed-point integers, so their sums are exact in any order. Bound by
// those passes, about 50 per edge, over 4 * vocab bytes in the L2; greedy rows take one.
#include <cmath>

#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/sampling/sampling_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarpLanes;
constexpr float kMassUnits = 0x1p46f;  // In 1.

struct Tally {
  uint64_t mass = 0;
  uint64_t count = 0;
};

// A row and the shared memory in which the block folds.
struct Row {
  const float* logits;  // [vocab]
  int64_t vocab;
  float largest;
  float temperature;
  Tally* tallies;  // [kWarps], shared
};

// Ascending key = descending logit, as on the CPU.
__device__ uint32_t DescendingKey(float logit) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0: they are equal.
  return (bits & 0x80000000u) != 0 ? bits : bits ^ 0x7fffffffu;
}
__device__ bool IsFinite(float x) { return fabsf(x) < INFINITY; }
__device__ uint64_t Shuffled(uint64_t value, int lanes) {
  return __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(value), lanes);
}

// The sum over the block, in all of its threads.
__device__ Tally BlockSum(Tally mine, Tally* tallies) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    mine.mass += Shuffled(mine.mass, lanes);
    mine.count += Shuffled(mine.count, lanes);
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpLanes == 0) tallies[thread / kWarpLanes] = mine;
  __syncthreads();
  Tally sum;
  for (int i = 0; i < kWarps; ++i) {
    sum.mass += tallies[i].mass;
    sum.count += tallies[i].count;
  }
  __syncthreads();
  return sum;
}

// The first in rank order as (key, id), or all ones when no logit is finite.
__device__ uint64_t FirstRanked(const float* logits, int64_t vocab, Tally* tallies) {
  uint64_t first = ~uint64_t{0};
  for (int64_t id = threadIdx.x; id < vocab; id += kThreads) {
    if (!IsFinite(logits[id])) continue;
    const uint64_t rank = uint64_t{DescendingKey(logits[id])} << 32 | static_cast<uint64_t>(id);
    first = rank < first ? rank : first;
  }
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    const uint64_t other = Shuffled(first, lanes);
    first = other < first ? other : first;
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpLanes == 0) tallies[thread / kWarpLanes].mass = first;
  __syncthreads();
  for (int i = 0; i < kWarps; ++i) {
    first = tallies[i].mass < first ? tallies[i].mass : first;
  }
  __syncthreads();
  return first;
}

// Of a token whose logit is finite; the likeliest has 1.
__device__ float MassOf(const Row& row, float logit) {
  return Exp((logit - row.largest) / row.temperature);
}

// Mass and number of the tokens that have at least `least` each.
__device__ Tally TallyOfLikely(const Row& row, float least) {
  Tally mine;
  for (int64_t i = threadIdx.x; i < row.vocab; i += kThreads) {
    if (!IsFinite(row.logits[i])) continue;
    const float mass = MassOf(row, row.logits[i]);
    if (mass < least) continue;
    mine.mass += static_cast<uint64_t>(mass * kMassUnits);
    mine.count += 1;
  }
  return BlockSum(mine, row.tallies);
}

// Mass and number of the tokens ranked up to and with (key, id).
__device__ Tally TallyUpTo(const Row& row, uint32_t key, int64_t id) {
  Tally mine;
  for (int64_t i = threadIdx.x; i < row.vocab; i += kThreads) {
    const float logit = row.logits[i];
    const uint32_t own = DescendingKey(logit);
    if (!IsFinite(logit) || own > key || (own == key && i > id)) continue;
    mine.mass += static_cast<uint64_t>(MassOf(row, logit) * kMassUnits);
    mine.count += 1;
  }
  return BlockSum(mine, row.tallies);
}

// What a prefix of the ranked tokens must have.
struct Goal {
  uint64_t mass = 0;
  uint64_t count = 0;
  __device__ bool IsReached(const Tally& tally) const {
    return tally.mass >= mass && tally.count >= count;
  }
};
struct Edge {
  int64_t id = 0;  // The last token of the prefix.
  Tally tally;     // Of the prefix.
};

// The shortest prefix that reaches the goal; all finite tokens together do.
__device__ Edge FindEdge(const Row& row, const Goal& goal) {
  uint32_t key = 0;
  for (uint32_t high = 0xffffffffu; key < high;) {
    const uint32_t middle = key + (high - key) / 2;
    if (goal.IsReached(TallyUpTo(row, middle, row.vocab))) {
      high = middle;
    } else {
      key = middle + 1;
    }
  }
  Edge edge;
  for (int64_t high = row.vocab - 1; edge.id < high;) {
    const int64_t middle = edge.id + (high - edge.id) / 2;
    if (goal.IsReached(TallyUpTo(row, key, middle))) {
      high = middle;
    } else {
      edge.id = middle + 1;
    }
  }
  edge.tally = TallyUpTo(row, key, edge.id);
  return edge;
}

__device__ int32_t Draw(const Row& row, float top_p, int32_t top_k, float min_p, float uniform) {
  const Tally all = TallyUpTo(row, 0xffffffffu, row.vocab);
  uint64_t total = all.mass;
  if (top_k > 0 && static_cast<uint64_t>(top_k) < all.count) {
    total = FindEdge(row, {.mass = 0, .count = static_cast<uint64_t>(top_k)}).tally.mass;
  }
  uint64_t kept = total;
  if (top_p > 0.0f && top_p < 1.0f) {
    const auto wanted =
        static_cast<uint64_t>(std::ceil(double{top_p} * static_cast<double>(total)));
    if (wanted < total) kept = FindEdge(row, {.mass = wanted, .count = 1}).tally.mass;
  }
  if (min_p > 0.0f) {  // Another prefix of the ranking: the shorter of the two stays.
    const uint64_t likely = TallyOfLikely(row, min_p < 1.0f ? min_p : 1.0f).mass;
    kept = likely < kept ? likely : kept;
  }
  // floor(uniform * kept) with the uniform number as 24 bits.
  const auto u = static_cast<uint64_t>(uniform * 0x1p24f);
  const uint64_t below = u * (kept >> 24) + (u * (kept & 0xffffffu) >> 24);
  return static_cast<int32_t>(FindEdge(row, {.mass = below + 1, .count = 1}).id);
}

// Grid: rows. Block: kThreads.
__global__ __launch_bounds__(kThreads) void SampleBlockPerRow(
    const float* __restrict__ logits,  // [rows, vocab], rows logits_stride apart
    int64_t vocab, int64_t logits_stride,
    const float* __restrict__ temperature,  // [rows]
    const float* __restrict__ top_p,        // [rows]
    const int32_t* __restrict__ top_k,      // [rows]
    const float* __restrict__ min_p,        // [rows]
    const uint64_t* __restrict__ seed,      // [rows]
    const uint64_t* __restrict__ counter,   // [rows]
    int32_t* __restrict__ tokens) {         // [rows]
  __shared__ Tally tallies[kWarps];
  const int64_t t = blockIdx.x;
  Row row = {logits + t * logits_stride, vocab, 0.0f, temperature[t], tallies};
  const uint64_t first = FirstRanked(row.logits, vocab, tallies);
  auto token = static_cast<int32_t>(first & 0xffffffffu);
  if (first == ~uint64_t{0}) {
    token = -1;
  } else if (row.temperature > 0.0f) {
    row.largest = row.logits[token];
    token = Draw(row, top_p[t], top_k[t], min_p[t], UniformAt(seed[t], counter[t]));
  }
  if (threadIdx.x == 0) tokens[t] = token;
}

}  // namespace

absl::Status LaunchSampleBatchCuda(const SamplingBatchArgs& args, const Exec& exec) {
  if (args.logits.rows == 0) return absl::OkStatus();
  return Launch("SampleBlockPerRow",
                {.grid = dim3(static_cast<unsigned>(args.logits.rows)), .block = dim3(kThreads)},
                exec, SampleBlockPerRow, args.logits.f32(0), args.logits.cols,
                args.logits.row_stride, args.temperature, args.top_p, args.top_k, args.min_p,
                args.seed, args.counter, args.tokens);
}

}  // namespace isthmus::kernels
