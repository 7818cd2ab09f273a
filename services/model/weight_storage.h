// SPDX-License-Identifier: Apache-2.0
// The memory behind weight views: anonymous chunks that only grow, and file mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "services/model/safetensors.h"

namespace isthmus::model {

class WeightStorage {
 public:
  WeightStorage() = default;
  ~WeightStorage();
  WeightStorage(const WeightStorage&) = delete;
  WeightStorage& operator=(const WeightStorage&) = delete;

  // `size` zero bytes, aligned to 64, that live as long as this object. ResourceExhausted when the
  // system refuses. Pages count against memory only once they are written.
  absl::StatusOr<uint8_t*> Take(int64_t size);
  int64_t taken_bytes() const { return taken_bytes_; }

  // Keeps files mapped.
  void Keep(std::vector<SafetensorsFile> files) { files_ = std::move(files); }
  int64_t mapped_bytes() const;

 private:
  struct Chunk {
    uint8_t* start = nullptr;
    int64_t size = 0;
  };

  std::vector<Chunk> chunks_;
  int64_t used_ = 0;  // Of the last chunk.
  int64_t taken_bytes_ = 0;
  std::vector<SafetensorsFile> files_;
};

}  // namespace isthmus::model
