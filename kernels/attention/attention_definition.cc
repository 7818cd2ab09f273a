// SPDX-License-Identifier: Apache-2.0
// The definition of attention: written to be read against the formula in attention.h, never to be
// fast. One template, so that the f32 yardstick is the same loops in another type.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/attention/attention_variants.h"
#include "kernels/core/formats.h"
#include "services/base/status_macros.h"

namespace isthmus::kernels {
namespace {

// The values of one stored entry, by the scalar codecs.
template <typename Real>
std::vector<Real> EntryValues(const AttentionArgs& args, EntryFormat format, const std::byte* data,
                              const std::byte* scale) {
  std::vector<Real> out(static_cast<size_t>(args.head_dim));
  const int64_t nope = args.head_dim - args.rope_dim;
  for (int64_t d = 0; d < args.head_dim; ++d) {
    float value = 0.0f;
    if (format == EntryFormat::kKvF32) {
      std::memcpy(&value, data + 4 * d, sizeof(value));
    } else if (d < nope) {
      value = Fp8E4m3Value(static_cast<uint8_t>(data[d])) *
              Ue8m0Value(static_cast<uint8_t>(scale[d / kKvNopeBlock]));
    } else {
      uint16_t bits = 0;
      std::memcpy(&bits, data + nope + 2 * (d - nope), sizeof(bits));
      value = Bf16Value(bits);
    }
    out[static_cast<size_t>(d)] = value;
  }
  return out;
}

// Keys of the query at `position`: the window in order of position, then entries in order of index.
template <typename Real>
std::vector<std::vector<Real>> Keys(const AttentionArgs& args, const SequenceKv& seq,
                                    int64_t position) {
  std::vector<std::vector<Real>> keys;
  for (int64_t p = std::max<int64_t>(0, position - args.window + 1); p <= position; ++p) {
    if (p >= seq.start_position) {
      const float* row = args.chunk_kv.f32(seq.first_row + p - seq.start_position);
      keys.emplace_back(row, row + args.head_dim);
    } else {
      const int64_t slot = p % args.window;
      keys.push_back(EntryValues<Real>(args, args.window_plane.format,
                                       args.window_plane.data(seq.state, slot),
                                       args.window_plane.scale(seq.state, slot)));
    }
  }
  if (args.ratio == 0) return keys;

  std::vector<int64_t> entries;
  if (args.selected != nullptr) {
    const int64_t row = seq.first_row + position - seq.start_position;
    const int32_t* selected = args.selected + row * args.max_selected;
    for (int64_t k = 0; k < args.max_selected; ++k) {
      if (selected[k] >= 0) entries.push_back(selected[k]);
    }
    std::sort(entries.begin(), entries.end());
  } else {
    for (int64_t j = 0; j < VisibleEntries(position, args.ratio); ++j) entries.push_back(j);
  }
  const PagedEntries paged = {seq.pages[args.entry_kind], args.entry_plane};
  for (int64_t j : entries) {
    keys.push_back(EntryValues<Real>(args, args.entry_plane.format, paged.data(j), paged.scale(j)));
  }
  return keys;
}

template <typename Real>
void AttendHead(const AttentionArgs& args, const std::vector<std::vector<Real>>& keys,
                const float* q, Real sink, float* out) {
  std::vector<Real> p(keys.size());
  Real max = -std::numeric_limits<Real>::infinity();
  for (size_t k = 0; k < keys.size(); ++k) {
    Real dot = 0;
    for (int64_t d = 0; d < args.head_dim; ++d) dot += q[d] * keys[k][static_cast<size_t>(d)];
    p[k] = args.scale * dot;
    max = std::max(max, p[k]);
  }
  Real denominator = 0;
  for (Real& value : p) {
    value = std::exp(value - max);
    denominator += value;
  }
  denominator += std::exp(sink - max);  // The sink is no key and is not part of the maximum.
  const bool is_reference = args.arithmetic == Arithmetic::kReference;
  if (is_reference) {
    for (Real& value : p) value = RoundBf16(static_cast<float>(value));
  }
  for (int64_t d = 0; d < args.head_dim; ++d) {
    Real sum = 0;
    for (size_t k = 0; k < keys.size(); ++k) sum += p[k] * keys[k][static_cast<size_t>(d)];
    const auto value = static_cast<float>(sum / denominator);
    out[d] = is_reference ? RoundBf16(value) : value;
  }
}

template <typename Real>
absl::Status Attend(const AttentionArgs& args) {
  ISTHMUS_RETURN_IF_ERROR(ValidateAttention(args));
  for (const SequenceKv& seq : args.sequences) {
    for (int64_t i = 0; i < seq.num_rows; ++i) {
      const auto keys = Keys<Real>(args, seq, seq.start_position + i);
      const float* q = args.q.f32(seq.first_row + i);
      float* out = args.out.f32(seq.first_row + i);
      for (int64_t h = 0; h < args.num_heads; ++h) {
        AttendHead<Real>(args, keys, q + h * args.head_dim, args.sink.f32()[h],
                         out + h * args.head_dim);
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status AttentionDefinition(const AttentionArgs& args, const Exec&) {
  return Attend<double>(args);
}

absl::Status AttentionNaive(const AttentionArgs& args, const Exec&) { return Attend<float>(args); }

}  // namespace isthmus::kernels
