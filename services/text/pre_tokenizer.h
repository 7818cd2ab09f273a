// SPDX-License-Identifier: Apache-2.0
// The Split stages of tokenizer.json, behaviour "Isolated": each stage cuts every piece of the
// stage before into its matches and the gaps between them, and sees nothing beyond that piece
// (so `\s+(?!\S)` takes all white space at the end of a piece).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace isthmus::text {

// Immutable after Create, so that threads may share it.
class PreTokenizer {
 public:
  // `patterns`: one regex per stage, in the form of tokenizer.json.
  // `jit`: compile to machine code (about 0.1 ms per pattern; pays off from some kilobytes on).
  // Errors: Unimplemented for constructs without a safe meaning (pattern.h) and for patterns that
  //         can match nothing; InvalidArgument when PCRE2 rejects one, with its reason and offset.
  static absl::StatusOr<PreTokenizer> Create(const std::vector<std::string>& patterns, bool jit);

  PreTokenizer(PreTokenizer&&) noexcept;
  PreTokenizer& operator=(PreTokenizer&&) noexcept;
  ~PreTokenizer();

  // Appends to `pieces` the views into `text` after all stages, in order; together they are
  // `text`. `text` must be valid UTF-8.
  // Errors: InvalidArgument when a match exceeds PCRE2's limits.
  absl::Status Split(absl::string_view text, std::vector<absl::string_view>* pieces) const;

 private:
  struct Stages;
  explicit PreTokenizer(std::unique_ptr<Stages> stages);

  std::unique_ptr<Stages> stages_;
};

}  // namespace isthmus::text
