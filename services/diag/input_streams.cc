// SPDX-License-Identifier: Apache-2.0
#include "services/diag/input_streams.h"

#include <cstring>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/core/formats.h"
#include "services/base/status_macros.h"
#include "services/model/safetensors.h"

namespace isthmus::diag {
namespace {

using model::TensorEntry;
using model::TensorType;

absl::StatusOr<const TensorEntry*> FindStreams(const model::SafetensorsFile& file, int layer,
                                               int64_t rows, int64_t row_width) {
  const std::string name = absl::StrCat("layer", layer, ".streams");
  for (const TensorEntry& entry : file.header().tensors) {
    if (entry.name != name) continue;
    const bool fits = entry.shape.size() == 3 && entry.shape[0] >= rows &&
                      entry.shape[1] * entry.shape[2] == row_width &&
                      (entry.type == TensorType::kBf16 || entry.type == TensorType::kF32);
    if (!fits) {
      return absl::InvalidArgumentError(absl::StrCat(
          file.path(), ": ", name, " is ", model::TypeAndShape(entry.type, entry.shape),
          ", expected BF16 or F32 [>= ", rows, ", 4, ", row_width / 4, "]"));
    }
    return &entry;
  }
  return absl::InvalidArgumentError(absl::StrCat(file.path(), ": ", name, " is missing"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<InputStreams>> InputStreams::Load(const std::string& path,
                                                                 int num_layers, int64_t rows,
                                                                 int64_t row_width) {
  ISTHMUS_ASSIGN_OR_RETURN(const model::SafetensorsFile file, model::SafetensorsFile::Open(path));
  auto streams = std::make_unique<InputStreams>();
  streams->row_width_ = row_width;
  for (int layer = 0; layer + 1 < num_layers; ++layer) {
    ISTHMUS_ASSIGN_OR_RETURN(const TensorEntry* entry, FindStreams(file, layer, rows, row_width));
    std::vector<float> values(static_cast<size_t>(rows * row_width));
    const std::byte* bytes = file.bytes_of(*entry);
    for (size_t i = 0; i < values.size(); ++i) {
      if (entry->type == TensorType::kF32) {
        std::memcpy(&values[i], bytes + 4 * i, 4);
        continue;
      }
      uint16_t bits = 0;
      std::memcpy(&bits, bytes + 2 * i, 2);
      values[i] = kernels::Bf16Value(bits);
    }
    streams->layers_.push_back(std::move(values));
  }
  return streams;
}

const float* InputStreams::Rows(int layer, int64_t first_row) const {
  if (layer == 0) return nullptr;
  return layers_[static_cast<size_t>(layer - 1)].data() + first_row * row_width_;
}

}  // namespace isthmus::diag
