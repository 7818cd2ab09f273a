// SPDX-License-Identifier: Apache-2.0
// The tensors of a golden file or of a dump of ours, as values, with what the file says about the
// noise to expect.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "services/diag/dump.h"

namespace isthmus::fidelity {

struct Tensor {
  std::string dtype;           // "F32", "BF16", "I32" or "U8"
  std::vector<int64_t> shape;  // At least one axis.
  std::vector<float> values;   // Exact: every dtype above fits (ids are small).

  int64_t rows() const { return shape[0]; }
  int64_t row_size() const;
};

// The noise floor of one tensor: of its relative L2 error, or for sets of their mean overlap.
struct Floor {
  double l2 = 0.0;
  double overlap = 1.0;
};

struct TensorSet {
  std::map<std::string, Tensor> tensors;
  std::string mode = "ref";  // "math" or "ref"
  double factor = 3.0;       // Recommended multiple of the floors.
  std::map<std::string, Floor> floors;
  int64_t first_late_row = 0;  // Of q, index_q and attn_core in stages.ref.

  // Null when absent.
  const Tensor* Find(const std::string& name) const;
};

// InvalidArgument or NotFound name the file and what is wrong with it.
absl::StatusOr<TensorSet> ReadTensorSet(const std::string& path);
TensorSet FromDump(const diag::Dump& dump);

// The token ids of a file's input_ids.
std::vector<int32_t> InputIds(const TensorSet& set);

}  // namespace isthmus::fidelity
