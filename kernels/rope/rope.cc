// SPDX-License-Identifier: Apache-2.0
// Frequencies, validation and the variant table of rope.
#include "kernels/rope/rope.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/core/math.h"
#include "kernels/rope/rope_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr double kTwoPi = 6.283185307179586;

// base^exponent for base >= 1 and exponent in [0, 1), as the product of the square roots
// base^(1/2), base^(1/4), ... that the bits of the exponent select. An f32 exponent of at least
// 2^-24 has its lowest bit at 2^-48 or above, so nothing is cut off. Each root is correctly rounded
// and halves the error before it: the result is within about 24 half ulps of f64, some 2^24 times
// finer than the f32 that it is rounded to. libm's pow is not the same on every machine.
double PowerOfFraction(double base, double exponent) {
  double product = 1.0;
  double root = base;
  double weight = 0.5;
  for (int bit = 1; bit <= 48; ++bit, weight *= 0.5) {
    root = std::sqrt(root);
    if (exponent >= weight) {
      exponent -= weight;
      product *= root;
    }
  }
  return product;
}

// The pair that turns `rotations` times within the original context (specification 3.3).
double PairOfRotations(const RopeTableParams& params, double rotations) {
  const double context = static_cast<double>(params.original_positions) / (rotations * kTwoPi);
  return params.rope_dim * LogF64(context) / (2.0 * LogF64(params.theta));
}

absl::Status CheckPositions(const RopeArgs& args) {
  for (size_t t = 0; t < args.positions.size(); ++t) {
    const int64_t position = args.positions[t];
    if (position < 0 || position >= (int64_t{1} << 31)) {
      return absl::InvalidArgumentError(absl::StrCat("rope: position of token ", t, " is ",
                                                     position, "; it must be in [0, 2^31)"));
    }
  }
  return absl::OkStatus();
}

constexpr RopeVariant kVariants[] = {
    {nullptr, kAnyCuda, nullptr, LaunchRopeCuda},
    {nullptr, kCpuOnly, nullptr, LaunchRopeCpu},
};

}  // namespace

// Every operation is the f32 operation of the author's code, in its order; only the power is
// evaluated in f64 and rounded once.
std::vector<float> RopeFrequencies(const RopeTableParams& params) {
  const int pairs = params.rope_dim / 2;
  const auto base = static_cast<double>(static_cast<float>(params.theta));
  std::vector<float> frequency(static_cast<size_t>(std::max(pairs, 0)));
  for (int i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(params.rope_dim);
    frequency[i] = 1.0f / static_cast<float>(PowerOfFraction(base, exponent));
  }
  if (params.original_positions == 0) return frequency;

  const double low = std::max(std::floor(PairOfRotations(params, params.beta_fast)), 0.0);
  const double high =
      std::min(std::ceil(PairOfRotations(params, params.beta_slow)), params.rope_dim - 1.0);
  const auto width = static_cast<float>(high != low ? high - low : 0.001);
  const auto factor = static_cast<float>(params.factor);
  for (int i = 0; i < pairs; ++i) {
    const float ramp =
        std::clamp((static_cast<float>(i) - static_cast<float>(low)) / width, 0.0f, 1.0f);
    const float smooth = 1.0f - ramp;
    frequency[i] = frequency[i] / factor * (1.0f - smooth) + frequency[i] * smooth;
  }
  return frequency;
}

std::span<const RopeVariant> RopeVariants() { return kVariants; }

absl::Status ValidateRope(const RopeArgs& args, int arch) {
  if (args.x.dtype != DType::kF32) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: x must be f32, has dtype ", static_cast<int>(args.x.dtype)));
  }
  if (args.head_dim < 1 || args.x.cols < 1 || args.x.cols % args.head_dim != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: x has ", args.x.cols, " columns, head_dim is ", args.head_dim));
  }
  const auto pairs = static_cast<int64_t>(args.frequency.size());
  if (pairs < 1 || pairs > kMaxRopePairs || 2 * pairs > args.head_dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: ", pairs, " frequencies; there must be 1 to ", kMaxRopePairs,
                     ", and head_dim ", args.head_dim, " holds ", args.head_dim / 2, " pairs"));
  }
  if (static_cast<int64_t>(args.positions.size()) != args.x.rows) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: x has ", args.x.rows, " tokens, positions ", args.positions.size()));
  }
  if (args.x.rows > 1 && args.x.row_stride < args.x.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: x has row stride ", args.x.row_stride, ", columns ", args.x.cols));
  }
  if (args.x.rows > 0 && args.x.data == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rope: x has ", args.x.rows, " rows and null data"));
  }
  return IsDevice(arch) ? absl::OkStatus() : CheckPositions(args);
}

absl::Status Rope(const RopeArgs& args, const Exec& exec) {
  ISTHMUS_RETURN_IF_ERROR(ValidateRope(args, exec.arch));
  ISTHMUS_ASSIGN_OR_RETURN(const RopeVariant* variant, Choose(RopeVariants(), args, exec));
  return variant->launch(args, exec);
}

}  // namespace isthmus::kernels
