// SPDX-License-Identifier: Apache-2.0
// The checks that every operation over cached sequences makes: the sequences cut the rows without
// gaps, and the pages reach as far as the tokens.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/core/kv_layout.h"
#include "kernels/core/tensor.h"

namespace isthmus::kernels {

// InvalidArgument unless the sequences, in order, own exactly the rows [0, rows).
inline absl::Status CheckSequences(absl::string_view operation,
                                   std::span<const SequenceKv> sequences, int64_t rows) {
  int64_t next_row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const SequenceKv& seq = sequences[i];
    if (seq.first_row != next_row || seq.num_rows < 0 || seq.start_position < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          operation, ": sequence ", i, " has first_row ", seq.first_row, ", expected ", next_row,
          ", num_rows ", seq.num_rows, ", start_position ", seq.start_position));
    }
    next_row += seq.num_rows;
  }
  if (next_row == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(operation, ": sequences own ", next_row, " rows, the batch has ", rows));
}

// InvalidArgument unless the pages of `kind` hold `entries` entries of `plane`.
inline absl::Status CheckPages(absl::string_view operation, const SequenceKv& seq,
                               CacheKindIndex kind, const EntryPlane& plane, int64_t entries) {
  if (plane.entries <= 0 || plane.data_bytes <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(operation, ": plane has ", plane.entries,
                                                   " entries of ", plane.data_bytes,
                                                   " bytes, both must be positive"));
  }
  const int64_t held = static_cast<int64_t>(seq.pages[kind].size()) * plane.entries;
  if (held >= entries) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(operation, ": sequence at row ", seq.first_row,
                                                 " has pages for ", held, " entries, needs ",
                                                 entries));
}

// InvalidArgument unless `m` is an f32 matrix of this shape whose rows do not overlap.
inline absl::Status CheckF32Matrix(absl::string_view name, const MatrixView& m, int64_t rows,
                                   int64_t cols) {
  if (m.dtype != DType::kF32 || m.rows != rows || m.cols != cols || m.row_stride < m.cols) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is [", m.rows, ", ", m.cols, "], stride ", m.row_stride, ", dtype ",
                     static_cast<int>(m.dtype), "; needs f32 [", rows, ", ", cols, "]"));
  }
  if (m.data == nullptr && rows > 0) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is null with ", rows, " rows"));
  }
  return absl::OkStatus();
}

}  // namespace isthmus::kernels
