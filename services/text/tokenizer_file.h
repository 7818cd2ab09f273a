// SPDX-License-Identifier: Apache-2.0
// Reads Hugging Face's tokenizer.json, of byte-level BPE tokenizers only. Every field is either
// understood or refused by name: a setting passed over would give other token ids, unnoticed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool is_special = false;
  // Cut in the second pass, after the tokens that are not normalized. There is no normalizer, but
  // the order of the passes still decides between overlapping tokens.
  bool is_normalized = false;
};

struct TokenizerFile {
  std::vector<AddedToken> added_tokens;
  std::vector<std::string> split_patterns;                  // Split stages, in order.
  std::vector<std::pair<std::string, int32_t>> vocab;       // Content in the byte alphabet -> id.
  std::vector<std::pair<std::string, std::string>> merges;  // By rank.
};

// Errors: InvalidArgument (not JSON, a field missing or of the wrong type), Unimplemented (a
//         setting that this tokenizer does not have); both name the field.
absl::StatusOr<TokenizerFile> ParseTokenizerFile(absl::string_view json);

}  // namespace isthmus::text
