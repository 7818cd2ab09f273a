// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of sampling. Greedy is two vectorised passes over the logits: the largest,
// then where it stands. Otherwise the logits are ranked by a stable radix sort of their bits (three
// passes of 11 bits), which orders equal logits by id without asking; a comparison sort of a real
// vocabulary would cost five times as much. Compiled once for the floor (AVX2).
#include <algorithm>
#include <array>
#include <cmath>

#include "hwy/highway.h"
#include "kernels/core/math.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"
#include "kernels/sampling/sampling_ranks.h"
#include "kernels/sampling/sampling_variants.h"

namespace isthmus::kernels {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
constexpr hn::FixedTag<float, 8> kFloats;
constexpr int64_t kLanes = 8;
// Fewer are compared: the digits of a radix sort cost a few microseconds even for one.
constexpr int64_t kFewRanked = 256;

// The smallest id whose logit equals `value`, which occurs.
int32_t FirstEqual(const float* logits, int64_t n, float value) {
  const auto wanted = hn::Set(kFloats, value);
  int64_t i = 0;
  while (i + kLanes <= n && hn::AllFalse(kFloats, hn::Eq(hn::LoadU(kFloats, logits + i), wanted))) {
    i += kLanes;
  }
  while (i + 1 < n && logits[i] != value) ++i;
  return static_cast<int32_t>(i);
}

// Stably by key: three passes of 11 bits.
void RadixSort(Ranked* items, Ranked* scratch, int64_t n) {
  constexpr int kDigitBits = 11;
  constexpr int kPasses = 3;
  constexpr uint32_t kDigits = 1u << kDigitBits;
  std::array<int64_t, kDigits> start;
  for (int pass = 0; pass < kPasses; ++pass) {
    const int shift = pass * kDigitBits;
    start.fill(0);
    for (int64_t i = 0; i < n; ++i) ++start[(items[i].key >> shift) % kDigits];
    int64_t next = 0;
    for (int64_t& count : start) {
      const int64_t size = count;
      count = next;
      next += size;
    }
    for (int64_t i = 0; i < n; ++i) scratch[start[(items[i].key >> shift) % kDigits]++] = items[i];
    std::swap(items, scratch);
  }
}

}  // namespace

float LargestFinite(const float* logits, int64_t n) {
  const auto lowest = hn::Set(kFloats, kNoFiniteLogit);
  auto largest = lowest;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto value = hn::LoadU(kFloats, logits + i);
    largest = hn::Max(largest, hn::IfThenElse(hn::IsFinite(value), value, lowest));
  }
  float result = hn::GetLane(hn::MaxOfLanes(kFloats, largest));
  for (; i < n; ++i) {
    if (std::isfinite(logits[i])) result = std::max(result, logits[i]);
  }
  return result;
}

void SortRanked(Ranked* items, Ranked* scratch, int64_t n) {
  if (n > kFewRanked) {
    RadixSort(items, scratch, n);
    return;
  }
  std::copy_n(items, n, scratch);
  std::sort(scratch, scratch + n);
}

int32_t DrawRanked(const SamplingArgs& args, const Ranked* ranked, const float* mass, int64_t n) {
  if (args.top_k > 0) n = std::min<int64_t>(n, args.top_k);
  double total = 0.0;
  for (int64_t rank = 0; rank < n; ++rank) total += mass[rank];

  const double wanted = double{args.top_p} * total;
  double kept = 0.0;
  int64_t prefix = 0;
  // The first mass is 1, so a mass is the likelihood in units of the largest.
  while (prefix < n && kept < wanted && mass[prefix] >= args.min_p) kept += mass[prefix++];

  const double target = double{UniformAt(args.seed, args.counter)} * kept;
  double reached = 0.0;
  for (int64_t rank = 0; rank < prefix; ++rank) {
    reached += mass[rank];
    if (reached > target) return ranked[rank].id;
  }
  return ranked[0].id;  // Not reached: `reached` ends at `kept`, which is above the target.
}

int64_t SampleScratchBytes(int64_t vocab) {
  ScratchCount scratch;
  scratch.Take<Ranked>(vocab);
  scratch.Take<Ranked>(vocab);
  scratch.Take<float>(vocab);
  return scratch.peak_bytes();
}

absl::StatusOr<int32_t> LaunchSampleCpu(const SamplingArgs& args, const Exec& exec) {
  const float* logits = args.logits.f32();
  const float largest = LargestFinite(logits, args.logits.size);
  if (largest == kNoFiniteLogit) return NoFiniteLogit(args.logits.size);
  if (args.temperature == 0.0f) return FirstEqual(logits, args.logits.size, largest);

  Workspace::Scope scope(exec.workspace);
  auto* items = scope.Take<Ranked>(args.logits.size);
  auto* ranked = scope.Take<Ranked>(args.logits.size);
  int64_t n = 0;
  for (int64_t id = 0; id < args.logits.size; ++id) {
    if (!std::isfinite(logits[id])) continue;
    items[n++] = {DescendingKey(logits[id]), static_cast<int32_t>(id)};
  }
  SortRanked(items, ranked, n);
  auto* mass = scope.Take<float>(n);
  for (int64_t rank = 0; rank < n; ++rank) {
    mass[rank] = Exp((logits[ranked[rank].id] - largest) / args.temperature);
  }
  return DrawRanked(args, ranked, mass, n);
}

// One row after another: a server on the CPU samples few.
absl::Status LaunchSampleBatchCpu(const SamplingBatchArgs& args, const Exec& exec) {
  for (int64_t t = 0; t < args.logits.rows; ++t) {
    const VectorView logits = F32Vector(args.logits.f32(t), args.logits.cols);
    if (LargestFinite(logits.f32(), logits.size) == kNoFiniteLogit) {
      args.tokens[t] = -1;
      continue;
    }
    const absl::StatusOr<int32_t> token = LaunchSampleCpu({.logits = logits,
                                                           .temperature = args.temperature[t],
                                                           .top_p = args.top_p[t],
                                                           .top_k = args.top_k[t],
                                                           .min_p = args.min_p[t],
                                                           .seed = args.seed[t],
                                                           .counter = args.counter[t]},
                                                          exec);
    if (!token.ok()) return token.status();
    args.tokens[t] = *token;
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
