// SPDX-License-Identifier: Apache-2.0
// A checkpoint directory as Hugging Face lays it out: model.safetensors.index.json and its shards,
// or one model.safetensors, mapped read-only. Index and shards must agree in full.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "services/model/safetensors.h"

namespace isthmus::model {

// weight_map of an index, by tensor name, and the distinct shards, by file name.
struct CheckpointIndex {
  struct Row {
    std::string tensor;
    int shard = 0;  // Into `shards`.
  };
  std::vector<Row> tensors;
  std::vector<std::string> shards;
};

// InvalidArgument: malformed JSON (bounded_json.h), no or an empty weight_map, more than 10,000
// shards, or a shard name that is not a plain file name (a path could leave the directory).
absl::StatusOr<CheckpointIndex> ParseCheckpointIndex(absl::string_view json);

struct CheckpointTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  const std::byte* bytes = nullptr;  // In the mapping; row-major, little-endian.
  int64_t size = 0;                  // Bytes.
};

class Checkpoint {
 public:
  // NotFound: no index and no model.safetensors, or a shard is missing. InvalidArgument: a file is
  // malformed, or index and shards disagree; the message names file and tensor.
  static absl::StatusOr<Checkpoint> Open(const std::string& dir);

  // Sorted by name.
  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }
  // Null when there is none. Valid as long as this object.
  const CheckpointTensor* Find(absl::string_view name) const;
  int num_shards() const { return static_cast<int>(shards_.size()); }
  const std::vector<SafetensorsFile>& shards() const { return shards_; }
  // Moves the mappings out, for a caller that keeps views into them; leaves nothing behind.
  std::vector<SafetensorsFile> TakeShards() && { return std::move(shards_); }

 private:
  std::vector<SafetensorsFile> shards_;
  std::vector<CheckpointTensor> tensors_;
};

}  // namespace isthmus::model
