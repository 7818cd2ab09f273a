// SPDX-License-Identifier: Apache-2.0
// Validation and the variant tables of sampling.
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
// Sums of masses in units of 2^-46 fit in 64 bits.
constexpr int64_t kMaxDeviceVocabulary = (int64_t{1} << 18) - 1;

constexpr Patch kOnDevice = {
    .name = "sampling.on_device",
    .summary =
        "A step on a GPU draws its tokens itself, so that a token comes back to the host instead "
        "of a row of the vocabulary, and the host does not draw one row after another.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = false,
    .bound = kTrustedBound,
    .test = "SamplingOnDeviceTest",
    .decision = "kernels/sampling/decisions/0001-drawn-beside-the-logits.md"};
constexpr Patch kBuckets = {
    .name = "sampling.buckets",
    .summary =
        "A block adds masses up in buckets of neighbouring logits and looks for an edge among the "
        "tokens of one bucket, since bisection over a row takes some 50 passes per edge.",
    .phases = kPhasePrefill | kPhaseDecode,
    .default_on = false,
    .bound = {NumericClass::kBitExact},
    .test = "SamplingCudaTest",
    .decision = "kernels/sampling/decisions/0002-buckets-before-bisection.md"};
constexpr Patch kCandidates = {.name = "sampling.candidates",
                               .summary =
                                   "A draw on the CPU ranks only the tokens that may be drawn, "
                                   "found by adding up masses above "
                                   "a few thresholds, instead of sorting the vocabulary.",
                               .phases = kPhasePrefill | kPhaseDecode,
                               .default_on = true,
                               .bound = {},
                               .test = "SamplingVariantTest",
                               .decision = "kernels/sampling/decisions/0003-rank-candidates.md"};

constexpr const Patch* kPatches[] = {&kOnDevice, &kBuckets, &kCandidates};

bool HasRowsOfFours(const SamplingBatchArgs& args) {
  const auto address = reinterpret_cast<uintptr_t>(args.logits.data);
  return args.logits.cols % 4 == 0 && address % 16 == 0 &&
         (args.logits.rows < 2 || args.logits.row_stride % 4 == 0);
}

constexpr SamplingVariant kVariants[] = {
    {&kCandidates, kCpuOnly, RanksCandidates, LaunchSampleCandidates},
    {nullptr, kCpuOnly, nullptr, LaunchSampleCpu},
};
constexpr SamplingBatchVariant kBatchVariants[] = {
    {&kBuckets, kAnyCuda, HasRowsOfFours, LaunchSampleBuckets},
    {nullptr, kAnyCuda, nullptr, LaunchSampleBatchCuda},
    {nullptr, kCpuOnly, nullptr, LaunchSampleBatchCpu},
};

}  // namespace

absl::Status ValidateSampling(float temperature, float top_p, int32_t top_k, float min_p) {
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
  if (!(min_p >= 0.0f && min_p <= 1.0f)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: min_p is ", min_p, "; it must be at least 0 and at most 1"));
  }
  return absl::OkStatus();
}

std::span<const Patch* const> SamplingPatches() { return kPatches; }

std::span<const SamplingVariant> SamplingVariants() { return kVariants; }

absl::Status ValidateSamplingArgs(const SamplingArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSampling(args.temperature, args.top_p, args.top_k, args.min_p));
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

bool DrawsOnDevice(int64_t vocabulary, const Exec& exec) {
  return IsDevice(exec.arch) && vocabulary <= kMaxDeviceVocabulary && IsActive(kOnDevice, exec);
}

absl::StatusOr<int32_t> Sample(const SamplingArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSamplingArgs(args));
  ISTHMUS_ASSIGN_OR_RETURN(const SamplingVariant* variant, Choose(SamplingVariants(), args, exec));
  return variant->launch(args, exec);
}

std::span<const SamplingBatchVariant> SamplingBatchVariants() { return kBatchVariants; }

absl::Status ValidateSamplingBatch(const SamplingBatchArgs& args, int arch) {
  const MatrixView& logits = args.logits;
  if (logits.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: logits must be f32, have dtype ", static_cast<int>(logits.dtype)));
  }
  const int64_t limit = IsDevice(arch) ? kMaxDeviceVocabulary : kMaxVocabulary;
  if (logits.rows < 0 || logits.cols < 1 || logits.cols > limit ||
      (logits.rows > 1 && logits.row_stride < logits.cols)) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: logits are [", logits.rows, ", ", logits.cols, "], rows ",
                     logits.row_stride, " apart; there must be 1 to ", limit, " in a row"));
  }
  if (logits.rows == 0) return absl::OkStatus();
  if (logits.data == nullptr || args.temperature == nullptr || args.top_p == nullptr ||
      args.top_k == nullptr || args.min_p == nullptr || args.seed == nullptr ||
      args.counter == nullptr || args.tokens == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampling: an array is null for ", logits.rows, " rows"));
  }
  if (IsDevice(arch)) return absl::OkStatus();
  for (int64_t t = 0; t < logits.rows; ++t) {
    ISTHMUS_RETURN_IF_ERROR(
        ValidateSampling(args.temperature[t], args.top_p[t], args.top_k[t], args.min_p[t]));
  }
  return absl::OkStatus();
}

absl::Status SampleBatch(const SamplingBatchArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateSamplingBatch(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const SamplingBatchVariant* variant,
                           Choose(SamplingBatchVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
