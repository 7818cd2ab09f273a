// SPDX-License-Identifier: Apache-2.0
// The definition of the indexer: written to be read against the formula in indexer.h, never to be
// fast. One template, so that the f32 yardstick is the same loops in another type.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/core/formats.h"
#include "kernels/core/index_key.h"
#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_variants.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

// Key `j`, by the scalar codecs.
template <typename Real>
std::vector<Real> KeyValues(const IndexerArgs& args, const PagedEntries& paged, int64_t j) {
  std::vector<Real> out(static_cast<size_t>(args.dim));
  for (int64_t d = 0; d < args.dim; ++d) {
    out[static_cast<size_t>(d)] =
        IndexKeyValue(args.key_plane.format, paged.data(j), paged.scale(j), d);
  }
  return out;
}

template <typename Real>
Real Rounded(Real x, Arithmetic arithmetic) {
  return arithmetic == Arithmetic::kReference ? Real{RoundBf16(static_cast<float>(x))} : x;
}

template <typename Real>
Real Score(const IndexerArgs& args, const float* q, const float* w, const std::vector<Real>& key) {
  Real score = 0;
  for (int64_t h = 0; h < args.num_heads; ++h) {
    Real dot = 0;
    for (int64_t d = 0; d < args.dim; ++d) dot += q[h * args.dim + d] * key[static_cast<size_t>(d)];
    dot = Rounded(dot, args.arithmetic);
    if (dot < 0) dot = 0;
    score += Rounded(dot * w[h], args.arithmetic);
  }
  return Rounded(score, args.arithmetic);
}

// Larger score first, NaN last, then smaller index.
template <typename Real>
void Select(const std::vector<Real>& scores, int64_t topk, int32_t* selected) {
  std::vector<int32_t> order(scores.size());
  for (size_t j = 0; j < order.size(); ++j) order[j] = static_cast<int32_t>(j);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const Real x = scores[static_cast<size_t>(a)];
    const Real y = scores[static_cast<size_t>(b)];
    if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
    return x > y;
  });
  for (int64_t k = 0; k < topk; ++k) {
    selected[k] = k < static_cast<int64_t>(order.size()) ? order[static_cast<size_t>(k)] : -1;
  }
}

template <typename Real>
absl::Status Index(const IndexerArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateIndexer(args));
  for (const SequenceKv& seq : args.sequences) {
    if (seq.num_rows == 0) continue;
    const PagedEntries paged = {seq.pages[kIndexKey], args.key_plane};
    std::vector<std::vector<Real>> keys;
    const int64_t num_keys = VisibleKeys(seq.start_position + seq.num_rows - 1);
    keys.reserve(static_cast<size_t>(num_keys));
    for (int64_t j = 0; j < num_keys; ++j) {
      keys.push_back(KeyValues<Real>(args, paged, j));
    }
    for (int64_t row = seq.first_row; row < seq.first_row + seq.num_rows; ++row) {
      std::vector<Real> scores(
          static_cast<size_t>(VisibleKeys(seq.start_position + row - seq.first_row)));
      for (size_t j = 0; j < scores.size(); ++j) {
        scores[j] = Score<Real>(args, args.q.f32(row), args.w.f32(row), keys[j]);
      }
      Select(scores, args.topk, args.selected + row * args.topk);
      if (args.scores == nullptr) continue;
      float* out = args.scores + row * args.scores_stride;
      std::fill(out, out + args.scores_stride, -std::numeric_limits<float>::infinity());
      for (size_t j = 0; j < scores.size(); ++j) out[j] = static_cast<float>(scores[j]);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status IndexerDefinition(const IndexerArgs& args, const Exec&) { return Index<double>(args); }

absl::Status IndexerNaive(const IndexerArgs& args, const Exec&) { return Index<float>(args); }

}  // namespace isthmus::kernels
