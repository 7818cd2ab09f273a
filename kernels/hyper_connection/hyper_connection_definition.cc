// SPDX-License-Identifier: Apache-2.0
// The definitions. Written to be read against the formulas in hyper_connection.h and specification
// 2.3 to 2.5, never to be fast: f64 throughout, one loop per sum in the formula. exp is libm's, so
// that the definition shares nothing with what it is held against.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/gemm.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/hyper_connection/hyper_connection_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

constexpr int M = kNumStreams;

double SigmoidOf(double z) { return 1.0 / (1.0 + std::exp(-z)); }

float Rounded(double value, Arithmetic arithmetic) {
  const auto narrow = static_cast<float>(value);
  return arithmetic == Arithmetic::kReference ? RoundBf16(narrow) : narrow;
}

// mix[k] = rsqrt(mean(v^2) + epsilon) * sum_i fn[k, i] v[i]
std::vector<double> Mixes(const float* v, const WeightView& fn, double epsilon) {
  double sum_of_squares = 0.0;
  for (int64_t i = 0; i < fn.cols; ++i) sum_of_squares += double{v[i]} * v[i];
  const double r = 1.0 / std::sqrt(sum_of_squares / static_cast<double>(fn.cols) + epsilon);
  std::vector<double> mixes(fn.rows);
  for (int64_t k = 0; k < fn.rows; ++k) {
    double sum = 0.0;
    for (int64_t i = 0; i < fn.cols; ++i) sum += WeightValue(fn, k, i) * v[i];
    mixes[k] = r * sum;
  }
  return mixes;
}

using Square = std::array<std::array<double, M>, M>;

void DivideRows(double epsilon, Square* c) {
  for (int j = 0; j < M; ++j) {
    double sum = 0.0;
    for (int k = 0; k < M; ++k) sum += (*c)[j][k];
    for (int k = 0; k < M; ++k) (*c)[j][k] /= sum + epsilon;
  }
}

void DivideColumns(double epsilon, Square* c) {
  for (int k = 0; k < M; ++k) {
    double sum = 0.0;
    for (int j = 0; j < M; ++j) sum += (*c)[j][k];
    for (int j = 0; j < M; ++j) (*c)[j][k] /= sum + epsilon;
  }
}

Square Sinkhorn(const double* logits, int iterations, double epsilon) {
  Square c;
  for (int j = 0; j < M; ++j) {
    const double* row = logits + int64_t{M} * j;
    const double largest = *std::max_element(row, row + M);
    double sum = 0.0;
    for (int k = 0; k < M; ++k) sum += std::exp(row[k] - largest);
    for (int k = 0; k < M; ++k) {
      c[j][k] = std::exp(row[k] - largest) / sum + epsilon;
    }
  }
  DivideColumns(epsilon, &c);
  for (int pass = 1; pass < iterations; ++pass) {
    DivideRows(epsilon, &c);
    DivideColumns(epsilon, &c);
  }
  return c;
}

// x[d] = sum_m pre[m] v[m, d]
void Combine(const float* v, const double* pre, const MatrixView& x, int64_t t,
             Arithmetic arithmetic) {
  for (int64_t d = 0; d < x.cols; ++d) {
    double sum = 0.0;
    for (int m = 0; m < M; ++m) sum += pre[m] * v[m * x.cols + d];
    x.f32(t)[d] = Rounded(sum, arithmetic);
  }
}

}  // namespace

absl::Status HyperConnectionPreDefinition(const HyperConnectionPreArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPre(args));
  const float* scale = args.scale.f32();
  const float* base = args.base.f32();
  for (int64_t t = 0; t < args.streams.rows; ++t) {
    const float* v = args.streams.f32(t);
    const std::vector<double> mix = Mixes(v, args.fn, args.epsilon);

    double pre[M];
    for (int j = 0; j < M; ++j) {
      pre[j] = SigmoidOf(mix[j] * scale[0] + base[j]) + args.hc_epsilon;
      args.post.f32(t)[j] =
          static_cast<float>(2.0 * SigmoidOf(mix[M + j] * scale[1] + base[M + j]));
    }
    double logits[M * M];
    for (int i = 0; i < M * M; ++i) logits[i] = mix[2 * M + i] * scale[2] + base[2 * M + i];
    const Square c = Sinkhorn(logits, args.sinkhorn_iterations, args.hc_epsilon);
    for (int i = 0; i < M * M; ++i) args.comb.f32(t)[i] = static_cast<float>(c[i / M][i % M]);

    Combine(v, pre, args.x, t, args.arithmetic);
  }
  return absl::OkStatus();
}

absl::Status HyperConnectionPostDefinition(const HyperConnectionPostArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionPost(args));
  const int64_t hidden = args.y.cols;
  for (int64_t t = 0; t < args.y.rows; ++t) {
    for (int64_t d = 0; d < hidden; ++d) {
      double mixed[M];
      for (int j = 0; j < M; ++j) {
        mixed[j] = double{args.post.f32(t)[j]} * args.y.f32(t)[d];
        for (int i = 0; i < M; ++i) {
          mixed[j] += double{args.comb.f32(t)[i * M + j]} * args.streams.f32(t)[i * hidden + d];
        }
      }
      // After all four sums: out may be streams.
      for (int j = 0; j < M; ++j) {
        args.out.f32(t)[j * hidden + d] = Rounded(mixed[j], args.arithmetic);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status HyperConnectionHeadDefinition(const HyperConnectionHeadArgs& args, const Exec&) {
  ISTHMUS_RETURN_IF_ERROR(ValidateHyperConnectionHead(args));
  for (int64_t t = 0; t < args.streams.rows; ++t) {
    const float* v = args.streams.f32(t);
    const std::vector<double> mix = Mixes(v, args.fn, args.epsilon);
    double pre[M];
    for (int m = 0; m < M; ++m) {
      pre[m] = SigmoidOf(mix[m] * args.scale.f32()[0] + args.base.f32()[m]) + args.hc_epsilon;
    }
    Combine(v, pre, args.x, t, args.arithmetic);
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
