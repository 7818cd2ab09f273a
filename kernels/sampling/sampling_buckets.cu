// SPDX-License-Identifier: Apache-2.0
// Sampling with buckets, any architecture. Patch sampling.buckets; a block per row. One pass adds
// up masses in buckets of neighbouring logits, in shared memory; whatever edge of the ranked masses
// is asked for then lies in a known bucket, whose few tokens a second pass collects and the block
// ranks among themselves. Sums are the integers of the trusted path, so tokens are the same. Bound
// by two to five passes over 4 * vocab bytes in the L2 (greedy: one), where the trusted path has
// some 50 per edge; a bucket with more tokens than the list holds (many equal logits, huge
// temperatures) falls back to those.
#include "kernels/sampling/sampling_device.cuh"
#include "kernels/sampling/sampling_variants.h"

namespace isthmus::kernels {
namespace {

constexpr int kBuckets = 2048;
constexpr int kBucketsPerThread = kBuckets / kSamplingThreads;
// Masses below 2^-46 of the largest count as nothing: the last bucket begins near that.
constexpr float kBucketsPerTemperature = 64.0f;
constexpr int kListSize = 1024;
static_assert(kListSize >= kSamplingThreads);

// A block's, 40 KB.
struct BucketShared {
  // Of the tokens of a bucket, then of all up to and with it.
  unsigned long long mass[kBuckets];
  unsigned count[kBuckets];
  // One bucket's tokens in any order: their ranks and masses. Before there are any, the sums of the
  // threads while the above are added up.
  unsigned long long list[kListSize];
  unsigned long long listed_mass[kListSize];
  unsigned num_listed;
};

// body(id, logit) for all finite logits of the row, four at a time.
template <typename Body>
__device__ __forceinline__ void ForEachFinite(const float* logits, int64_t vocab, Body body) {
  const auto* const fours = reinterpret_cast<const float4*>(logits);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < vocab / 4; i += kSamplingThreads) {
    const float4 four = fours[i];
    if (IsFinite(four.x)) body(4 * i, four.x);
    if (IsFinite(four.y)) body(4 * i + 1, four.y);
    if (IsFinite(four.z)) body(4 * i + 2, four.z);
    if (IsFinite(four.w)) body(4 * i + 3, four.w);
  }
}

class BucketedRanking {
 public:
  __device__ BucketedRanking(const Row& row, BucketShared& shared)
      : row_(row),
        shared_(shared),
        // Finite, so that the likeliest is in bucket 0 at any temperature.
        per_logit_(fminf(kBucketsPerTemperature / row.temperature, 3e38f)) {
    const auto thread = static_cast<int>(threadIdx.x);
    for (int b = thread; b < kBuckets; b += kSamplingThreads) {
      shared_.mass[b] = 0;
      shared_.count[b] = 0;
    }
    __syncthreads();
    ForEachFinite(row_.logits, row_.vocab, [&](int64_t, float logit) {
      const int b = BucketOf(logit);
      const uint64_t units = UnitsOf(MassOf(row_, logit));
      if (units > 0) atomicAdd(&shared_.mass[b], static_cast<unsigned long long>(units));
      atomicAdd(&shared_.count[b], 1u);
    });
    __syncthreads();
    AddUp();
  }

  __device__ Tally All() const { return UpTo(kBuckets - 1); }

  __device__ Edge FindEdge(const Goal& goal) {
    int bucket = 0;  // The first with which the goal is reached.
    for (int high = kBuckets - 1; bucket < high;) {
      const int middle = bucket + (high - bucket) / 2;
      if (goal.IsReached(UpTo(middle))) {
        high = middle;
      } else {
        bucket = middle + 1;
      }
    }
    const Tally below = bucket == 0 ? Tally{} : UpTo(bucket - 1);
    if (UpTo(bucket).count - below.count > kListSize) return FindEdgeByBisection(row_, goal);
    List(bucket);
    return FindListed(below, goal);
  }

  __device__ Tally TallyOfLikely(float least) const {
    Tally mine;
    ForEachFinite(row_.logits, row_.vocab, [&](int64_t, float logit) {
      const float mass = MassOf(row_, logit);
      if (mass < least) return;
      mine.mass += UnitsOf(mass);
      mine.count += 1;
    });
    return BlockSum(mine, row_.tallies);
  }

 private:
  // Does not fall from one token of the ranking to the next.
  __device__ int BucketOf(float logit) const {
    return static_cast<int>(fminf((row_.largest - logit) * per_logit_, kBuckets - 1.0f));
  }
  __device__ Tally UpTo(int bucket) const {
    return {.mass = shared_.mass[bucket], .count = shared_.count[bucket]};
  }

  // From tallies of buckets to those of all up to each.
  __device__ void AddUp() {
    const auto thread = static_cast<int>(threadIdx.x);
    Tally own;
    for (int i = 0; i < kBucketsPerThread; ++i) {
      const Tally one = UpTo(thread * kBucketsPerThread + i);
      own = {.mass = own.mass + one.mass, .count = own.count + one.count};
    }
    Tally up_to = own;
    shared_.listed_mass[thread] = up_to.mass;
    shared_.list[thread] = up_to.count;
    __syncthreads();
    for (int distance = 1; distance < kSamplingThreads; distance *= 2) {
      Tally before;
      if (thread >= distance) {
        before = {.mass = shared_.listed_mass[thread - distance],
                  .count = shared_.list[thread - distance]};
      }
      __syncthreads();
      up_to = {.mass = up_to.mass + before.mass, .count = up_to.count + before.count};
      shared_.listed_mass[thread] = up_to.mass;
      shared_.list[thread] = up_to.count;
      __syncthreads();
    }
    Tally sum = {.mass = up_to.mass - own.mass, .count = up_to.count - own.count};
    for (int i = 0; i < kBucketsPerThread; ++i) {
      const int b = thread * kBucketsPerThread + i;
      sum = {.mass = sum.mass + shared_.mass[b], .count = sum.count + shared_.count[b]};
      shared_.mass[b] = sum.mass;
      shared_.count[b] = static_cast<unsigned>(sum.count);
    }
    __syncthreads();
  }

  // The bucket's tokens, which the list has room for.
  __device__ void List(int bucket) {
    if (threadIdx.x == 0) shared_.num_listed = 0;
    __syncthreads();
    ForEachFinite(row_.logits, row_.vocab, [&](int64_t id, float logit) {
      if (BucketOf(logit) != bucket) return;
      const unsigned place = atomicAdd(&shared_.num_listed, 1u);
      shared_.list[place] = RankOf(logit, id);
      shared_.listed_mass[place] = UnitsOf(MassOf(row_, logit));
    });
    __syncthreads();
  }

  // The first listed token with which the goal is reached, behind the tokens of `below`.
  __device__ Edge FindListed(const Tally& below, const Goal& goal) {
    const unsigned size = shared_.num_listed;
    uint64_t first = ~uint64_t{0};
    Tally of_first;
    for (unsigned i = threadIdx.x; i < size; i += kSamplingThreads) {
      const uint64_t rank = shared_.list[i];
      if (rank >= first) continue;
      Tally tally = below;
      for (unsigned j = 0; j < size; ++j) {
        if (shared_.list[j] > rank) continue;
        tally.mass += shared_.listed_mass[j];
        tally.count += 1;
      }
      if (!goal.IsReached(tally)) continue;
      first = rank;
      of_first = tally;
    }
    const uint64_t edge = BlockMin(first, row_.tallies);
    if (first != edge) of_first = {};  // Ranks are distinct: one thread has it.
    return {.id = static_cast<int64_t>(edge & 0xffffffffu),
            .tally = BlockSum(of_first, row_.tallies)};
  }

  const Row& row_;
  BucketShared& shared_;
  const float per_logit_;
};

// Grid: rows. Block: kSamplingThreads. Requires rows of whole float4, 16-byte aligned.
__global__ __launch_bounds__(kSamplingThreads) void SampleByBuckets(
    const float* __restrict__ logits,  // [rows, vocab], rows logits_stride apart
    int64_t vocab, int64_t logits_stride,
    const float* __restrict__ temperature,  // [rows]
    const float* __restrict__ top_p,        // [rows]
    const int32_t* __restrict__ top_k,      // [rows]
    const float* __restrict__ min_p,        // [rows]
    const uint64_t* __restrict__ seed,      // [rows]
    const uint64_t* __restrict__ counter,   // [rows]
    int32_t* __restrict__ tokens) {         // [rows]
  __shared__ BucketShared shared;
  __shared__ Tally tallies[kSamplingWarps];
  const int64_t t = blockIdx.x;
  Row row = {logits + t * logits_stride, vocab, 0.0f, temperature[t], tallies};
  uint64_t first = ~uint64_t{0};
  ForEachFinite(row.logits, vocab, [&](int64_t id, float logit) {
    const uint64_t rank = RankOf(logit, id);
    first = rank < first ? rank : first;
  });
  first = BlockMin(first, row.tallies);
  auto token = static_cast<int32_t>(first & 0xffffffffu);
  if (first == ~uint64_t{0}) {
    token = -1;
  } else if (row.temperature > 0.0f) {
    row.largest = row.logits[token];
    BucketedRanking ranking(row, shared);
    token = DrawToken(ranking, {top_p[t], top_k[t], min_p[t], UniformAt(seed[t], counter[t])});
  }
  if (threadIdx.x == 0) tokens[t] = token;
}

}  // namespace

absl::Status LaunchSampleBuckets(const SamplingBatchArgs& args, const Exec& exec) {
  return LaunchRows("SampleByBuckets", SampleByBuckets, args, exec);
}

}  // namespace isthmus::kernels
