// SPDX-License-Identifier: Apache-2.0
// What the CUDA paths of sampling have in common: a row in the hands of one block, exact sums of
// masses over it, and the draw as a question of where the ranked masses reach a goal.
#pragma once

#include <cmath>

#include "kernels/core/launch.cuh"
#include "kernels/core/math.h"
#include "kernels/sampling/sampling.h"

namespace isthmus::kernels {

constexpr int kSamplingThreads = 512;
constexpr int kSamplingWarps = kSamplingThreads / kWarpLanes;
constexpr float kMassUnits = 0x1p46f;  // In 1.

// Of some tokens of a row.
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
  Tally* tallies;  // [kSamplingWarps], shared
};

// Ascending key = descending logit, as on the CPU.
__device__ __forceinline__ uint32_t DescendingKey(float logit) {
  const auto bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes +0: they are equal.
  return (bits & 0x80000000u) != 0 ? bits : bits ^ 0x7fffffffu;
}
// The smaller, the earlier in the ranking.
__device__ __forceinline__ uint64_t RankOf(float logit, int64_t id) {
  return uint64_t{DescendingKey(logit)} << 32 | static_cast<uint64_t>(id);
}
__device__ __forceinline__ bool IsFinite(float x) { return fabsf(x) < INFINITY; }
__device__ __forceinline__ uint64_t Shuffled(uint64_t value, int lanes) {
  return __shfl_xor_sync(kFullWarp, static_cast<unsigned long long>(value), lanes);
}

// Of a token whose logit is finite; the likeliest has 1.
__device__ __forceinline__ float MassOf(const Row& row, float logit) {
  return Exp((logit - row.largest) / row.temperature);
}
__device__ __forceinline__ uint64_t UnitsOf(float mass) {
  return static_cast<uint64_t>(mass * kMassUnits);
}

// The sum over the block, in all of its threads.
__device__ __forceinline__ Tally BlockSum(Tally mine, Tally* tallies) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    mine.mass += Shuffled(mine.mass, lanes);
    mine.count += Shuffled(mine.count, lanes);
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpLanes == 0) tallies[thread / kWarpLanes] = mine;
  __syncthreads();
  Tally sum;
  for (int i = 0; i < kSamplingWarps; ++i) {
    sum.mass += tallies[i].mass;
    sum.count += tallies[i].count;
  }
  __syncthreads();
  return sum;
}

// The least over the block, in all of its threads.
__device__ __forceinline__ uint64_t BlockMin(uint64_t mine, Tally* tallies) {
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    const uint64_t other = Shuffled(mine, lanes);
    mine = other < mine ? other : mine;
  }
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread % kWarpLanes == 0) tallies[thread / kWarpLanes].mass = mine;
  __syncthreads();
  for (int i = 0; i < kSamplingWarps; ++i) {
    mine = tallies[i].mass < mine ? tallies[i].mass : mine;
  }
  __syncthreads();
  return mine;
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

// Mass and number of the tokens ranked up to and with (key, id).
__device__ __forceinline__ Tally TallyUpTo(const Row& row, uint32_t key, int64_t id) {
  Tally mine;
  for (int64_t i = threadIdx.x; i < row.vocab; i += kSamplingThreads) {
    const float logit = row.logits[i];
    const uint32_t own = DescendingKey(logit);
    if (!IsFinite(logit) || own > key || (own == key && i > id)) continue;
    mine.mass += UnitsOf(MassOf(row, logit));
    mine.count += 1;
  }
  return BlockSum(mine, row.tallies);
}

// The shortest prefix that reaches the goal, by bisection over (key, id): a pass over the row for
// every bit of them. All finite tokens together reach it.
__device__ inline Edge FindEdgeByBisection(const Row& row, const Goal& goal) {
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

// What a request says about a draw, beside its temperature.
struct DrawParams {
  float top_p;
  int32_t top_k;
  float min_p;
  float uniform;  // In [0, 1), 24 bits.
};

// The token of a draw. `ranking` has All(), FindEdge(goal) and TallyOfLikely(mass), the tally of
// the tokens that have at least so much each: a prefix of the ranking as well.
template <typename Ranking>
__device__ __forceinline__ int32_t DrawToken(Ranking& ranking, const DrawParams& params) {
  const Tally all = ranking.All();
  uint64_t total = all.mass;
  if (params.top_k > 0 && static_cast<uint64_t>(params.top_k) < all.count) {
    const Goal goal = {.mass = 0, .count = static_cast<uint64_t>(params.top_k)};
    total = ranking.FindEdge(goal).tally.mass;
  }
  uint64_t kept = total;
  if (params.top_p > 0.0f && params.top_p < 1.0f) {
    const auto wanted =
        static_cast<uint64_t>(std::ceil(double{params.top_p} * static_cast<double>(total)));
    if (wanted < total) kept = ranking.FindEdge({.mass = wanted, .count = 1}).tally.mass;
  }
  if (params.min_p > 0.0f) {  // The shorter of the two prefixes stays.
    const uint64_t likely = ranking.TallyOfLikely(params.min_p < 1.0f ? params.min_p : 1.0f).mass;
    kept = likely < kept ? likely : kept;
  }
  // floor(uniform * kept) with the uniform number as 24 bits.
  const auto u = static_cast<uint64_t>(params.uniform * 0x1p24f);
  const uint64_t below = u * (kept >> 24) + (u * (kept & 0xffffffu) >> 24);
  return static_cast<int32_t>(ranking.FindEdge({.mass = below + 1, .count = 1}).id);
}

// A block per row of one of the kernels that draw.
template <typename Kernel>
absl::Status LaunchRows(const char* name, Kernel kernel, const SamplingBatchArgs& args,
                        const Exec& exec) {
  if (args.logits.rows == 0) return absl::OkStatus();
  const auto rows = static_cast<unsigned>(args.logits.rows);
  return Launch(name, {.grid = dim3(rows), .block = dim3(kSamplingThreads)}, exec, kernel,
                args.logits.f32(0), args.logits.cols, args.logits.row_stride, args.temperature,
                args.top_p, args.top_k, args.min_p, args.seed, args.counter, args.tokens);
}

}  // namespace isthmus::kernels
