// SPDX-License-Identifier: Apache-2.0
// Sequence images (sequence_image.h) as files.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/core/kv_layout.h"
#include "services/engine/sequence_image.h"

namespace isthmus::engine {

// Writes a file that appears under its name only when it is whole and on the disk. An error names
// the path.
absl::Status SaveImageFile(const std::string& path, std::span<const std::byte> image);

// The bytes of a file. When its header is refused (CheckImageHeader), nothing more of it is read.
// InvalidArgument: no regular file.
absl::StatusOr<std::vector<std::byte>> LoadImageFile(const std::string& path,
                                                     const kernels::KvLayout& layout,
                                                     const ImageTerms& terms);

}  // namespace isthmus::engine
