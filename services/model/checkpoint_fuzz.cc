// SPDX-License-Identifier: Apache-2.0
// Fuzzes what a checkpoint's files can hold before any tensor is read. The first byte chooses the
// parser: 0 a whole safetensors file, 1 the leading bytes of a file whose size the next 8 bytes
// give, 2 an index, 3 a config.json. All in memory.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/string_view.h"
#include "services/base/check.h"
#include "services/model/checkpoint.h"
#include "services/model/model_config.h"
#include "services/model/safetensors.h"

namespace isthmus::model {
namespace {

// A header that was accepted tiles the data: nothing that a reader may touch lies outside.
void FuzzHeader(absl::string_view leading, uint64_t file_bytes) {
  const auto header = ParseSafetensorsHeader(leading, file_bytes, "fuzz");
  if (!header.ok()) return;
  uint64_t at = 0;
  for (const TensorEntry& entry : header->tensors) {
    ISTHMUS_CHECK(entry.begin == at && entry.end >= entry.begin);
    at = entry.end;
  }
  ISTHMUS_CHECK(header->data_offset + at == file_bytes);
}

void FuzzIndex(absl::string_view text) {
  const auto index = ParseCheckpointIndex(text);
  if (!index.ok()) return;
  for (const CheckpointIndex::Row& row : index->tensors) {
    ISTHMUS_CHECK(row.shard >= 0 && static_cast<size_t>(row.shard) < index->shards.size());
  }
  for (const std::string& shard : index->shards) {
    ISTHMUS_CHECK(shard.find('/') == std::string::npos && shard != "..");
  }
}

void FuzzConfig(absl::string_view text) {
  const auto config = ParseModelConfig(text);
  if (!config.ok()) return;
  ISTHMUS_CHECK(ValidateModelConfig(*config).ok());
  ISTHMUS_CHECK(!CanonicalModelConfig(*config).empty());
}

}  // namespace
}  // namespace isthmus::model

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using namespace isthmus::model;  // NOLINT(google-build-using-namespace): a C entry point.
  if (size == 0) return 0;
  const absl::string_view rest(reinterpret_cast<const char*>(bytes) + 1, size - 1);
  uint64_t file_bytes = 0;
  switch (bytes[0] % 4) {
    case 0:
      FuzzHeader(rest, rest.size());
      break;
    case 1:
      if (rest.size() < sizeof(file_bytes)) return 0;
      std::memcpy(&file_bytes, rest.data(), sizeof(file_bytes));
      FuzzHeader(rest.substr(sizeof(file_bytes)), file_bytes);
      break;
    case 2:
      FuzzIndex(rest);
      break;
    default:
      FuzzConfig(rest);
  }
  return 0;
}
