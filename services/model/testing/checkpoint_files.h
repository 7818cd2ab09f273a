// SPDX-License-Identifier: Apache-2.0
// Checkpoints that tests write, break and read: a miniature of every layer kind with random bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/core/weight.h"
#include "services/model/model_config.h"
#include "services/model/safetensors_writer.h"
#include "services/model/tensor_plan.h"

namespace isthmus::model {

// A fresh folder, removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

void WriteFileBytes(const std::string& path, const std::string& bytes);

// A tensor and its bytes, to be changed before it is written.
struct StoredTensor {
  std::string name;
  TensorType type = TensorType::kF32;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;
  int shard = 0;
};

// The files of a checkpoint in memory.
struct CheckpointFiles {
  std::string config_json;
  std::vector<StoredTensor> tensors;
  int num_shards = 1;
  bool has_index = true;

  StoredTensor& Find(const std::string& name);  // Check-fails when there is none.
  void Erase(const std::string& name);
  // Writes config.json, the shards and, when has_index, the index.
  void Write(const std::string& dir) const;
};

// Four layers (ratios 0, 4, 128 and 4; the first one hash-routed), 4 experts of which 2 are used.
// Odd on purpose: output groups of 16 rows that share one fp8 scale block, 24 rows in the gate.
std::string MiniatureConfigJson();

// That model with valid random bytes: no NaN anywhere. `experts` is kMxfp4, kNvfp4 (not a cast) or
// kFp8Block128. One April mtp stage, or three DSpark stages; tensors spread over `num_shards`.
CheckpointFiles MiniatureCheckpoint(kernels::WeightFormat experts, bool is_dspark = false,
                                    int num_shards = 3);

// Re-encodes every NVFP4 expert of `files` as a lossless cast of random MXFP4 (specification 6.3).
void MakeLosslessCast(CheckpointFiles* files);

}  // namespace isthmus::model
