// SPDX-License-Identifier: Apache-2.0
// The trusted CPU path of the compressor: three passes over the batch with a barrier between them.
// ape is added to every row; entries are pooled, each by one thread; rows that later chunks read go
// into the state ring. The ring is written last, since the entries of this chunk still read it.
//
// Letters: d channel, j entry, p position.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "kernels/compressor/compressor_variants.h"
#include "kernels/core/hadamard.h"
#include "kernels/core/index_key.h"
#include "kernels/core/math.h"
#include "kernels/core/quantise.h"
#include "kernels/core/scratch_count.h"
#include "kernels/core/workspace.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/compressor/compressor_cpu.cc"
#include <hwy/foreach_target.h>
#include "kernels/core/simd-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace isthmus::kernels {
namespace HWY_NAMESPACE {

// Sixteen channels at a time; rows in ascending order of position.
void PoolT(const PoolRow* rows, size_t count, int64_t dim, float* out) {
  for (int64_t d = 0; d < dim; d += 16) {
    F32x16 max = Load16(rows[0].g + d);
    for (size_t k = 1; k < count; ++k) max = Max16(max, Load16(rows[k].g + d));
    F32x16 numerator = Zero16();
    F32x16 denominator = Zero16();
    for (size_t k = 0; k < count; ++k) {
      const F32x16 weight = Exp16(Sub16(Load16(rows[k].g + d), max));
      numerator = MulAdd16(weight, Load16(rows[k].u + d), numerator);
      denominator = Add16(denominator, weight);
    }
    const auto divide = [](VF a, VF b) HWY_ATTR { return hn::Div(a, b); };
    Store16(Map16(divide, numerator, denominator), out + d);
  }
}

void NormT(const float* weight, int64_t dim, float epsilon, float* z) {
  const float mean = Dot16(z, z, static_cast<size_t>(dim)) / static_cast<float>(dim);
  const F32x16 scale = Set16(1.0f / std::sqrt(mean + epsilon));
  for (int64_t d = 0; d < dim; d += 16) {
    Store16(Mul16(Mul16(Load16(z + d), scale), Load16(weight + d)), z + d);
  }
}

void AddRowT(const float* a, int64_t n, float* y) {
  const auto count = static_cast<size_t>(n);
  for (size_t k = 0; k + 16 <= count; k += 16) Store16(Add16(Load16(y + k), Load16(a + k)), y + k);
  for (size_t k = count / 16 * 16; k < count; ++k) y[k] += a[k];
}

// NOLINTNEXTLINE(google-readability-namespace-comments)
}  // namespace HWY_NAMESPACE
}  // namespace isthmus::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace isthmus::kernels {
namespace {

HWY_EXPORT(PoolT);
HWY_EXPORT(NormT);
HWY_EXPORT(AddRowT);

// An entry that completes in this chunk.
struct CompletedEntry {
  int32_t sequence = 0;
  int64_t j = 0;
};

// The row of position `p` at channel `c`: in the ring when it is older than the chunk.
PoolRow RowAt(const CompressorArgs& args, const SequenceKv& seq, int64_t p, int64_t c) {
  if (p < seq.start_position) {
    const std::byte* data = args.state_plane.data(seq.state, p % CompressorRing(args.ratio));
    const float* row = reinterpret_cast<const float*>(data) + c;
    return {row, row + CompressorWidth(args)};
  }
  const int64_t r = seq.first_row + p - seq.start_position;
  return {args.u.f32(r) + c, args.g.f32(r) + c};
}

// RoPE on the last rope_dim channels at the entry's first position.
void RotateEntry(const CompressorArgs& args, int64_t position, float* z) {
  float* x = z + args.dim - args.rope_dim;
  for (size_t i = 0; i < args.frequency.size(); ++i) {
    float sin = 0.0f;
    float cos = 0.0f;
    SinCos(static_cast<float>(position) * args.frequency[i], &sin, &cos);
    const float a = x[2 * i];
    const float b = x[2 * i + 1];
    x[2 * i] = a * cos - b * sin;
    x[2 * i + 1] = a * sin + b * cos;
  }
}

// Writes the entry to its page; z becomes the value that a reader of the page decodes.
void StoreEntry(const CompressorArgs& args, std::byte* data, std::byte* scale, float* z) {
  const auto dim = static_cast<int>(args.dim);
  if (args.arithmetic == Arithmetic::kMath) {
    std::memcpy(data, z, sizeof(float) * static_cast<size_t>(args.dim));
  } else if (args.is_index_key) {
    HadamardButterflies(z, args.dim);
    const float factor = 1.0f / std::sqrt(static_cast<float>(args.dim));
    for (int64_t d = 0; d < args.dim; ++d) z[d] *= factor;
    RoundBf16Row(z, args.dim, z);
    const EntryFormat format = args.entry_plane.format;
    EncodeIndexKeyAs(format, z, dim, data, scale);
    if (args.entries == nullptr) return;
    for (int64_t d = 0; d < args.dim; ++d) z[d] = IndexKeyValue(format, data, scale, d);
  } else {
    const auto rope_dim = static_cast<int>(args.rope_dim);
    EncodeKvEntry(z, dim, rope_dim, data, scale);
    if (args.entries != nullptr) DecodeKvEntry(data, scale, dim, rope_dim, z);
  }
}

void CompressEntry(const CompressorArgs& args, const SequenceKv& seq, int64_t j, float* z) {
  std::array<PoolRow, kMaxPoolRows> rows;
  size_t count = 0;
  const int64_t current = args.ratio * j;
  for (int64_t p = FirstPooledPosition(j, args.ratio); p < current + args.ratio; ++p) {
    const bool is_second_half = args.ratio == 4 && p >= current;
    rows[count++] = RowAt(args, seq, p, is_second_half ? args.dim : 0);
  }
  const bool is_reference = args.arithmetic == Arithmetic::kReference;
  PoolRowsCpu({rows.data(), count}, args.dim, z);
  if (is_reference) RoundBf16Row(z, args.dim, z);
  HWY_DYNAMIC_DISPATCH(NormT)(args.norm_weight.f32(), args.dim, args.epsilon, z);
  if (is_reference) RoundBf16Row(z, args.dim, z);
  RotateEntry(args, current, z);
  if (is_reference) RoundBf16Row(z, args.dim, z);
  const PagedEntries paged = {seq.pages[args.entry_kind], args.entry_plane};
  StoreEntry(args, paged.data(j), paged.scale(j), z);
}

void AddApe(const CompressorArgs& args, const SequenceKv& seq, int64_t row) {
  const int64_t p = seq.start_position + row - seq.first_row;
  HWY_DYNAMIC_DISPATCH(AddRowT)(args.ape.f32(p % args.ratio), args.ape.cols, args.g.f32(row));
}

// Keeps the row if a later entry reads it.
void KeepRow(const CompressorArgs& args, const SequenceKv& seq, int64_t row) {
  const int64_t p = seq.start_position + row - seq.first_row;
  if (p < FirstKeptPosition(seq.start_position + seq.num_rows, args.ratio)) return;
  const auto bytes = sizeof(float) * static_cast<size_t>(CompressorWidth(args));
  std::byte* data = args.state_plane.data(seq.state, p % CompressorRing(args.ratio));
  std::memcpy(data, args.u.f32(row), bytes);
  std::memcpy(data + bytes, args.g.f32(row), bytes);
}

}  // namespace

void PoolRowsCpu(std::span<const PoolRow> rows, int64_t dim, float* out) {
  HWY_DYNAMIC_DISPATCH(PoolT)(rows.data(), rows.size(), dim, out);
}

int64_t CompressorScratchBytes(int64_t rows, int64_t sequences, int64_t ratio, int64_t dim,
                               int threads) {
  ScratchCount scratch;
  scratch.Take<int32_t>(rows);
  scratch.Take<CompletedEntry>(std::clamp<int64_t>(rows / ratio + sequences, 1, rows));
  scratch.Take<float>(threads * dim);
  return scratch.peak_bytes();
}

absl::Status LaunchCompressorCpu(const CompressorArgs& args, const Exec& exec) {
  const int64_t rows = args.u.rows;
  if (rows == 0) return absl::OkStatus();
  Workspace::Scope scope(exec.workspace);
  auto* row_sequence = scope.Take<int32_t>(rows);
  int64_t num_entries = 0;
  for (const SequenceKv& seq : args.sequences) {
    num_entries += NewEntries(seq.start_position, seq.start_position + seq.num_rows, args.ratio);
  }
  auto* entries = scope.Take<CompletedEntry>(std::max<int64_t>(1, num_entries));
  auto* values = scope.Take<float>(NumThreads(exec) * args.dim);
  int64_t next = 0;
  for (size_t i = 0; i < args.sequences.size(); ++i) {
    const SequenceKv& seq = args.sequences[i];
    std::fill_n(row_sequence + seq.first_row, seq.num_rows, static_cast<int32_t>(i));
    const int64_t end = (seq.start_position + seq.num_rows) / args.ratio;
    for (int64_t j = seq.start_position / args.ratio; j < end; ++j) {
      entries[next++] = {static_cast<int32_t>(i), j};
    }
  }
  const auto sequence_of = [&](int64_t row) -> const SequenceKv& {
    return args.sequences[static_cast<size_t>(row_sequence[row])];
  };

  ParallelFor(exec, rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) AddApe(args, sequence_of(row), row);
  });
  ParallelFor(exec, num_entries, 1, [&](int64_t begin, int64_t end, int thread) {
    for (int64_t i = begin; i < end; ++i) {
      const CompletedEntry& entry = entries[i];
      float* z = args.entries != nullptr ? args.entries + i * args.dim : values + thread * args.dim;
      CompressEntry(args, args.sequences[static_cast<size_t>(entry.sequence)], entry.j, z);
    }
  });
  ParallelFor(exec, rows, 16, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) KeepRow(args, sequence_of(row), row);
  });
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
#endif  // HWY_ONCE
