// SPDX-License-Identifier: Apache-2.0
// Holds back incomplete characters.
#include "services/text/detokenizer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "services/text/utf8.h"

namespace isthmus::text {

std::string Detokenizer::Push(int32_t id) {
  if (skip_special_ && tokenizer_->IsSpecial(id)) return {};
  absl::StrAppend(&held_, tokenizer_->TokenBytes(id));
  return Decided(false);
}

std::string Detokenizer::Finish() { return Decided(true); }

std::string Detokenizer::Decided(bool at_end) {
  std::string text;
  size_t offset = 0;
  while (offset < held_.size()) {
    const Utf8Step step = NextUtf8(held_, offset);
    if (step.kind == Utf8Kind::kIncomplete && !at_end) break;
    if (step.kind == Utf8Kind::kCharacter) {
      text.append(held_, offset, step.size);
    } else {
      absl::StrAppend(&text, kReplacement);
    }
    offset += step.size;
  }
  held_.erase(0, offset);
  return text;
}

}  // namespace isthmus::text
