// SPDX-License-Identifier: Apache-2.0
// Which chat encoder a checkpoint was trained with, and its effort prefixes (spec 7.4). The
// checkpoint's own encoding_dsv4.py says so; it is read as text, never run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

enum class EncoderGeneration : uint8_t {
  kApril,  // Effort: none, high (both without prefix), max.
  k0731,   // Effort: none, low (both without prefix), high, max.
};

absl::string_view EncoderGenerationName(EncoderGeneration generation);

struct EncoderProfile {
  EncoderGeneration generation = EncoderGeneration::kApril;
  // Prefixes as the checkpoint's file spells them; absent where the built-in text is used. The
  // text of "max" of 0731 is not built in.
  std::optional<std::string> high_effort_prefix;  // 0731 only.
  std::optional<std::string> max_effort_prefix;
};

// From the source text of an encoding_dsv4.py.
// Errors: InvalidArgument when it declares neither generation, or an effort text is not a plain
//         string literal.
absl::StatusOr<EncoderProfile> ParseEncoderSource(absl::string_view source);

// Looks for encoding/encoding_dsv4.py, then encoding_dsv4.py, in the checkpoint's directory.
// Without either it is the April encoder. Errors: as above, with the path.
absl::StatusOr<EncoderProfile> LoadEncoderProfile(const std::string& checkpoint_dir);

}  // namespace isthmus::text
