// SPDX-License-Identifier: Apache-2.0
// Next-token choice from logits.
//
//   temperature == 0: arg max, the smaller id among equals (greedy).
//   otherwise: p = softmax(logits / temperature); keep the top_k largest (0: all), then the
//   smallest prefix of them in descending order whose mass reaches top_p of what top_k left, then
//   those of them that are at least min_p times as likely as the likeliest, as other engines do;
//   draw by inverse CDF with one uniform number from (seed, counter). Ties in the order by smaller
//   id.
//
// Shapes     logits: [vocab], or [rows, vocab] with the parameters of each row; rows are
//            independent.
// Types      f32 logits, i32 token.
// Numerics   Masses are exp((logit - largest) / temperature) in f32, which no temperature can
//            overflow; their sums f64 in order of rank. Only finite logits can be chosen; none is
//            an error, or the token -1 in a batch.
//            On a GPU masses are rounded down to multiples of 2^-46 and their sums are exact, in
//            any order: another token than the CPU's needs a uniform number or a cut within 2^-29
//            of the edge between two tokens. Greedy choices are the same.
// Devices    Sample: the CPU only. SampleBatch: all arrays are device memory; parameters are not
//            checked there (a temperature that is not above 0 is greedy, a top_k below 1 is none,
//            a top_p outside (0, 1) is 1, a min_p that is not above 0 is none, above 1 it is 1).
// Workspace  On a CPU 20 * vocab bytes; none when greedy.
// Phases     Prefill (the first token), decode.
// Errors     InvalidArgument  Empty logits (on a GPU also 2^18 and more), no finite logit,
//                             temperature negative or not finite, top_p outside (0, 1], top_k
//                             negative, min_p outside [0, 1].
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/exec.h"
#include "kernels/core/host_device.h"
#include "kernels/core/tensor.h"
#include "services/base/patch.h"

namespace isthmus::kernels {

struct SamplingArgs {
  VectorView logits;  // [vocab]
  float temperature = 0.0f;
  float top_p = 1.0f;
  int32_t top_k = 0;   // 0: no limit. May exceed the vocabulary.
  float min_p = 0.0f;  // 0: no limit.
  uint64_t seed = 0;
  uint64_t counter = 0;  // Number of tokens drawn before: the whole sampler state with the seed.
};

absl::StatusOr<int32_t> Sample(const SamplingArgs& args, const Exec& exec);
absl::StatusOr<int32_t> SampleDefinition(const SamplingArgs& args, const Exec& exec);

// Bytes of scratch that Sample takes on the CPU.
int64_t SampleScratchBytes(int64_t vocab);

// Each row as Sample would with the values of its place in the arrays.
struct SamplingBatchArgs {
  MatrixView logits;                   // [rows, vocab]
  const float* temperature = nullptr;  // [rows]
  const float* top_p = nullptr;        // [rows]
  const int32_t* top_k = nullptr;      // [rows]
  const float* min_p = nullptr;        // [rows]
  const uint64_t* seed = nullptr;      // [rows]
  const uint64_t* counter = nullptr;   // [rows]
  int32_t* tokens = nullptr;           // [rows], out; -1: no logit of the row is finite
};

absl::Status SampleBatch(const SamplingBatchArgs& args, const Exec& exec);

// Whether a step on a GPU draws tokens beside its logits, so that tokens come back to the host in
// place of rows of the vocabulary (patch sampling.on_device).
bool DrawsOnDevice(int64_t vocabulary, const Exec& exec);

std::span<const Patch* const> SamplingPatches();

namespace sampling {
// A bijection of 64 bits that spreads every input bit over the output (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014: the finaliser of SplitMix64).
ISTHMUS_HOST_DEVICE inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
inline constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, odd.
}  // namespace sampling

// The uniform number in [0, 1) of (seed, counter): 24 bits, counter-based, the same everywhere. The
// seed is mixed before the counter joins it, so that neighbouring seeds are not shifted copies of
// one stream.
ISTHMUS_HOST_DEVICE inline float UniformAt(uint64_t seed, uint64_t counter) {
  const uint64_t bits =
      sampling::Mix(sampling::Mix(seed + sampling::kGamma) + (counter + 1) * sampling::kGamma);
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

// InvalidArgument naming the field and its value, as Sample would.
absl::Status ValidateSampling(float temperature, float top_p, int32_t top_k, float min_p = 0.0f);

// Sample's error for a row without a finite logit, for who finds -1 in a batch.
absl::Status NoFiniteLogit(int64_t vocabulary);

}  // namespace isthmus::kernels
