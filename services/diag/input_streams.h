// SPDX-License-Identifier: Apache-2.0
// Residual streams from a file, from which the layers of a dump start: so that a fault of one layer
// does not hide those of the layers after it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace isthmus::diag {

class InputStreams {
 public:
  // Reads layer0.streams .. layer{num_layers - 2}.streams, [>= rows, 4, hidden], bf16 or f32.
  // A missing layer or a wrong shape is InvalidArgument that names it.
  static absl::StatusOr<std::unique_ptr<InputStreams>> Load(const std::string& path, int num_layers,
                                                            int64_t rows, int64_t row_width);

  // What `layer` starts from, rows from `first_row` on; null for layer 0 (the embedding).
  const float* Rows(int layer, int64_t first_row) const;

 private:
  int64_t row_width_ = 0;
  std::vector<std::vector<float>> layers_;  // [layer - 1]
};

}  // namespace isthmus::diag
