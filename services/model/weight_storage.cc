// SPDX-License-Identifier: Apache-2.0
#include "services/model/weight_storage.h"

#include <sys/mman.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace isthmus::model {
namespace {

constexpr int64_t kChunkBytes = 16 << 20;
constexpr int64_t kAlignment = 64;

}  // namespace

WeightStorage::~WeightStorage() {
  for (const Chunk& chunk : chunks_) munmap(chunk.start, static_cast<size_t>(chunk.size));
}

absl::StatusOr<uint8_t*> WeightStorage::Take(int64_t size) {
  const int64_t rounded = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (chunks_.empty() || chunks_.back().size - used_ < rounded) {
    const int64_t chunk_bytes = std::max(kChunkBytes, rounded);
    void* start = mmap(nullptr, static_cast<size_t>(chunk_bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "cannot have ", chunk_bytes, " bytes for weights beside the ", taken_bytes_, " held"));
    }
    chunks_.push_back({static_cast<uint8_t*>(start), chunk_bytes});
    used_ = 0;
  }
  uint8_t* out = chunks_.back().start + used_;
  used_ += rounded;
  taken_bytes_ += rounded;
  return out;
}

int64_t WeightStorage::mapped_bytes() const {
  int64_t total = 0;
  for (const SafetensorsFile& file : files_) total += file.file_bytes();
  return total;
}

}  // namespace isthmus::model
