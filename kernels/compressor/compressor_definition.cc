// SPDX-License-Identifier: Apache-2.0
// The definition of the compressor: written to be read against compressor.h, never to be fast. One
// template, so that the f32 yardstick is the same loops in another type.
#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/compressor/compressor.h"
#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/formats.h"
#include "kernels/core/hadamard.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

template <typename Real>
void RoundAll(std::vector<Real>& x) {
  for (Real& value : x) value = RoundBf16(static_cast<float>(value));
}

// u and g (with ape) of channel `c` of the row at position `p`.
template <typename Real>
void RowValue(const CompressorArgs& args, const SequenceKv& seq, int64_t p, int64_t c, Real* u,
              Real* g) {
  if (p < seq.start_position) {
    const std::byte* data = args.state_plane.data(seq.state, p % CompressorRing(args.ratio));
    const auto* row = reinterpret_cast<const float*>(data);
    *u = row[c];
    *g = row[CompressorWidth(args) + c];
  } else {
    const int64_t r = seq.first_row + p - seq.start_position;
    *u = args.u.f32(r)[c];
    *g = Real{args.g.f32(r)[c]} + Real{args.ape.f32(p % args.ratio)[c]};
  }
}

template <typename Real>
std::vector<Real> Pool(const CompressorArgs& args, const SequenceKv& seq, int64_t j) {
  std::vector<Real> z(static_cast<size_t>(args.dim));
  const int64_t begin = FirstPooledPosition(j, args.ratio);
  const int64_t current = args.ratio * j;
  const auto count = static_cast<size_t>(current + args.ratio - begin);
  std::vector<Real> u(count);
  std::vector<Real> g(count);
  for (int64_t d = 0; d < args.dim; ++d) {
    for (size_t k = 0; k < count; ++k) {
      const int64_t p = begin + static_cast<int64_t>(k);
      // The window that the entry shares with its predecessor gives the first half of channels.
      const bool is_second_half = args.ratio == 4 && p >= current;
      RowValue(args, seq, p, is_second_half ? args.dim + d : d, &u[k], &g[k]);
    }
    const Real max = *std::max_element(g.begin(), g.end());
    Real numerator = 0;
    Real denominator = 0;
    for (size_t k = 0; k < count; ++k) {
      const Real weight = std::exp(g[k] - max);
      numerator += weight * u[k];
      denominator += weight;
    }
    z[static_cast<size_t>(d)] = numerator / denominator;
  }
  return z;
}

template <typename Real>
void Norm(const CompressorArgs& args, std::vector<Real>& z) {
  Real sum_of_squares = 0;
  for (Real value : z) sum_of_squares += value * value;
  const Real mean = sum_of_squares / static_cast<Real>(args.dim);
  const Real scale = Real{1} / std::sqrt(mean + Real{args.epsilon});
  for (size_t d = 0; d < z.size(); ++d) z[d] = z[d] * scale * Real{args.norm_weight.f32()[d]};
}

template <typename Real>
void Rotate(const CompressorArgs& args, int64_t position, std::vector<Real>& z) {
  const auto first = static_cast<size_t>(args.dim - args.rope_dim);
  for (size_t i = 0; i < args.frequency.size(); ++i) {
    const float angle = static_cast<float>(position) * args.frequency[i];
    const auto cos = static_cast<Real>(std::cos(double{angle}));
    const auto sin = static_cast<Real>(std::sin(double{angle}));
    const Real a = z[first + 2 * i];
    const Real b = z[first + 2 * i + 1];
    z[first + 2 * i] = a * cos - b * sin;
    z[first + 2 * i + 1] = a * sin + b * cos;
  }
}

// The cache round trip of values on the bf16 grid.
template <typename Real>
void RoundTrip(const CompressorArgs& args, std::vector<Real>& z) {
  if (args.is_index_key && args.entry_plane.format == EntryFormat::kKeyBf16) return;
  const bool is_fp4 = args.is_index_key && args.entry_plane.format == EntryFormat::kKeyFp4;
  const auto end = static_cast<size_t>(args.is_index_key ? args.dim : args.dim - args.rope_dim);
  auto block = static_cast<size_t>(is_fp4 ? kIndexKeyBlock : kKvNopeBlock);
  if (args.is_index_key && !is_fp4) block = end;  // An fp8 key has one scale.
  for (size_t begin = 0; begin < end; begin += block) {
    const size_t stop = std::min(end, begin + block);
    float amax = 0.0f;
    for (size_t d = begin; d < stop; ++d) {
      amax = std::max(amax, std::fabs(static_cast<float>(z[d])));
    }
    const int exponent = is_fp4 ? Fp4ScaleExponent(amax) : Fp8ScaleExponent(amax);
    const float scale = PowerOfTwo(exponent);
    for (size_t d = begin; d < stop; ++d) {
      const float x = static_cast<float>(z[d]) / scale;
      z[d] = scale * (is_fp4 ? Fp4E2m1Value(Fp4E2m1Code(x)) : Fp8E4m3Value(Fp8E4m3Code(x)));
    }
  }
}

template <typename Real>
absl::Status Compress(const CompressorArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateCompressor(args));
  if (args.entries == nullptr) {
    return absl::InvalidArgumentError("compressor: the definition needs `entries`, it is null");
  }
  const bool is_reference = args.arithmetic == Arithmetic::kReference;
  float* out = args.entries;
  for (const SequenceKv& seq : args.sequences) {
    const int64_t end = (seq.start_position + seq.num_rows) / args.ratio;
    for (int64_t j = seq.start_position / args.ratio; j < end; ++j) {
      std::vector<Real> z = Pool<Real>(args, seq, j);
      if (is_reference) RoundAll(z);
      Norm(args, z);
      if (is_reference) RoundAll(z);
      Rotate(args, args.ratio * j, z);
      if (is_reference) {
        RoundAll(z);
        if (args.is_index_key) {
          HadamardButterflies(z.data(), args.dim);
          for (Real& value : z) value /= std::sqrt(static_cast<Real>(args.dim));
          RoundAll(z);
        }
        RoundTrip(args, z);
      }
      for (Real value : z) *out++ = static_cast<float>(value);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CompressorDefinition(const CompressorArgs& args, const Exec&) {
  return Compress<double>(args);
}

absl::Status CompressorNaive(const CompressorArgs& args, const Exec&) {
  return Compress<float>(args);
}

}  // namespace isthmus::kernels
