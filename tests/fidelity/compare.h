// SPDX-License-Identifier: Apache-2.0
// Holds a dump against golden tensors. A limit is factor * noise floor, both from the golden file,
// and never less than
//
//   1e-5   f32 tensors, and everything in math arithmetic (where it replaces factor * floor)
//   2^-8   bf16 tensors: one rounding
//   1e-2   KV entries, and their bytes after decoding: a flip of an e4m3 code
//   2e-2   index queries and keys, and their bytes after decoding: a flip of an e2m1 code
//
// Sets (topk, router_ids) are compared row by row as sets: in math all must be equal; in reference
// the mean overlap may fall below 1 by factor times what its floor does, and 0.01.
#pragma once

#include <string>
#include <vector>

#include "tests/fidelity/tensor_set.h"

namespace isthmus::fidelity {

struct Verdict {
  std::string name;
  bool passed = false;
  double error = 0.0;       // Relative L2; for sets 1 - mean overlap.
  double limit = 0.0;       // Of `error`.
  double same_rows = 1.0;   // Sets: share of rows that are equal. Bytes: share of equal bytes.
  std::string explanation;  // One line for people.
};

struct Comparison {
  std::vector<Verdict> verdicts;
  std::vector<std::string> missing;  // Golden tensors that the dump lacks.

  bool passed() const;
  // Every failure, or every verdict with `all`.
  std::string Report(bool all = false) const;
  // Null when the name was not compared.
  const Verdict* Find(const std::string& name) const;
};

// A tensor that `got` lacks, has in another shape or with NaN fails. `got` holds all rows; where
// the golden file holds some (its `positions`), those are compared.
Comparison Compare(const TensorSet& golden, const TensorSet& got);

// [entries, 584] bytes to [entries, 512] values: 448 e4m3, 64 bf16, 7 ue8m0, 1 zero.
Tensor DecodeKvEntries(const Tensor& bytes);
// [entries, 68] bytes to [entries, 128] values: 64 bytes of e2m1 pairs, 4 ue8m0.
Tensor DecodeIndexKeys(const Tensor& bytes);

// |got - want| / |want| over the places where `want` is finite; infinity when `got` is not finite
// in one of them.
double RelativeL2(const std::vector<float>& want, const std::vector<float>& got);

}  // namespace isthmus::fidelity
