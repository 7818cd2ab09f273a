// SPDX-License-Identifier: Apache-2.0
// Writes safetensors files: dumps of isthmus-diag, and the checkpoints of tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "services/model/safetensors.h"

namespace isthmus::model {

// A tensor to write. `bytes` is row-major and little-endian, owned by the caller.
struct NamedTensor {
  std::string name;
  std::string dtype;  // As the format names it: "F32", "BF16", "I32", "U8", "I64", "F8_E4M3", ...
  std::vector<int64_t> shape;
  std::span<const std::byte> bytes;
};

// Writes `path`.part, syncs it and renames it to `path`, so that a file under its own name is
// always complete. Tensors are laid out by falling element size, then in the order given; each is
// aligned to its element. InvalidArgument: an unknown dtype, bytes that do not match the shape, a
// name twice, the name __metadata__, a name that is not UTF-8. When the file
// system fails: the code and text of errno; the .part file is then removed.
absl::Status WriteSafetensors(const std::string& path, std::span<const NamedTensor> tensors,
                              const std::map<std::string, std::string>& metadata);

// The leading bytes of a file with these tensors (length prefix, JSON, spaces up to a multiple of
// 8): what follows is their data, from begin to end of each entry. Errors as above.
absl::StatusOr<std::string> FormatSafetensorsHeader(
    std::span<const TensorEntry> entries, const std::map<std::string, std::string>& metadata);

}  // namespace isthmus::model
