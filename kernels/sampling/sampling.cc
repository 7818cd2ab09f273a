// SPDX-License-Identifier: Apache-2.0
// The uniform numbers, validation and the variant table of sampling.
#include "kernels/sampling/sampling.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "kernels/sampling/sampling_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

// Largest id is an i32.
constexpr int64_t kMaxVocabulary = std::numeric_limits<int32_t>::max();

// A bijection of 64 bits that spreads every input bit over the output (Steele, Lea and Flood, "Fast
// splittable pseudorandom number generators", 2014: the finaliser of SplitMix64).
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr uint64_t kGamma = 0x9e3779b97f4a7c15u;  // 2^64 / golden ratio, odd.

constexpr SamplingVariant kVariants[] = {
    {nullptr, kCpuOnly, nullptr, LaunchSampleCpu},
};

}  // namespace

// The seed is mixed before the counter joins it, so that neighbouring seeds are not shifted copies
// of one stream.
float UniformAt(uint64_t seed, uint64_t counter) {
  const uint64_t bits = Mix(Mix(seed + kGamma) + (counter + 1) * kGamma);
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

absl::Status ValidateSampling(float temperature, float top_p, int32_t top_k) {
  if (!std::isfinite(temperature) || temperature < 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat("sampling: temperature is ", temperature,
                                                   "; it must be finite and at least 0"));
  }
  if (!(top_p > 0.0f && top_p <= 1.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: top_p is ", top_p, "; it must be above 0 and at most 1"));
  }
  if (top_k < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: top_k is ", top_k, "; it must be at least 0"));
  }
  return absl::OkStatus();
}

std::span<const SamplingVariant> SamplingVariants() { return kVariants; }

absl::Status ValidateSamplingArgs(const SamplingArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSampling(args.temperature, args.top_p, args.top_k));
  if (args.logits.dtype != DType::kF32) {
    return absl::InvalidArgumentError(absl::StrCat("sampling: logits must be f32, have dtype ",
                                                   static_cast<int>(args.logits.dtype)));
  }
  if (args.logits.size < 1 || args.logits.size > kMaxVocabulary || args.logits.data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("sampling: there are ", args.logits.size,
                                                   " logits; there must be 1 to ", kMaxVocabulary,
                                                   " at a valid address"));
  }
  return absl::OkStatus();
}

absl::Status NoFiniteLogit(int64_t vocabulary) {
  return absl::InvalidArgumentError(
      absl::StrCat("sampling: none of the ", vocabulary, " logits is finite"));
}

absl::StatusOr<int32_t> Sample(const SamplingArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSamplingArgs(args));
  ISTHMUS_ASSIGN_OR_RETURN(const SamplingVariant* variant, Choose(SamplingVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
